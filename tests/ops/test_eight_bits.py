"""Products in 8 bits, emulated where there is no GPU: errors within what rounding both operands can do; adapters are not rounded."""

import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.support.ops.arguments import NF4, eight_bits_case, lora_leaves, provider_in, with_lora_leaves
from tests.support.ops.checks import error
from tunecompile._torch import known_bugs
from tunecompile._torch.card import acting_as
from tunecompile._torch.fake_tensors import trace
from tunecompile.ir.op import OPS
from tunecompile.notes import note
from tunecompile.ops import eight_bits, lora_linear
from tunecompile.ops.eight_bits import FORMATS, FP8, INT8
from tunecompile.ops.frozen_weights import DENSE

UNIT = 2.0**-4  # e4m3 rounds by at most this
ADAPTER = 2.0**-7  # two e4m3 numbers a value, and the product that is left out
BF16 = 2.0**-8
FINEST = torch.finfo(torch.float8_e4m3fn).max ** -2  # of a row's largest: e4m3's smallest numbers are finer
STEP = 0.5 / 127  # of a row's largest: what rounding to integers is off by
pytestmark = pytest.mark.parametrize("eight", FORMATS, ids=lambda eight: eight.name)


def rounding(eight, x, weight, beside):
    """Of x weight^T, both rounded: the most that each element is off by. The scale of FP8's rows covers columns beside x, too."""
    x, weight, width = x.abs(), weight.abs(), x.shape[1]
    if eight is INT8:
        of_x, of_weight = STEP * x.amax(1, keepdim=True), STEP * weight.amax(1, keepdim=True)
        return of_x @ weight.sum(1)[None] + x.sum(1)[:, None] @ of_weight.t() + width * of_x @ of_weight.t()
    largest = torch.cat([x, beside.abs()], 1).amax(1, keepdim=True)
    return ((1 + UNIT) ** 2 - 1) * x @ weight.t() + FINEST * largest * weight.max() * width


def matrices(args):
    """In fp64: tokens, the weight, XA and the adapters side by side, and what is added."""
    x, inputs, weights, biases, a, b, scales, *_ = args
    tokens = x.double().flatten(0, -2)
    sources = [v.double().flatten(0, -2) for v in inputs] or [tokens] * len(a)
    xa = torch.cat([v @ m.double().t() for v, m in zip(sources, a)], 1)
    adapters = torch.block_diag(*[m.double() * s for m, s in zip(b, scales)])
    bias = torch.cat(biases).double() if biases else torch.zeros((), dtype=torch.float64)
    return tokens, torch.cat(weights).double(), xa, adapters, bias


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(bias=True),
        dict(own=True, bias=True),
        dict(adapters=torch.bfloat16),
        dict(sizes=(16,), ranks=(1,), k=16),
    ],
    ids=str,
)
def test_every_element_is_within_the_rounding_of_its_factors(eight, options):
    args = eight_bits_case(**options)
    y, xa = provider_in(lora_linear, eight.name).run(*args)
    reference, reference_xa = lora_linear(*args)
    assert (y.shape, y.dtype, y.is_contiguous()) == (reference.shape, reference.dtype, True) and error(
        xa, reference_xa
    ) < BF16
    tokens, weight, exact_xa, adapters, bias = matrices(args)
    exact = tokens @ weight.t() + exact_xa @ adapters.t() + bias
    limit = rounding(eight, tokens, weight, exact_xa) + ADAPTER * (exact_xa.abs() @ adapters.abs().t())
    assert ((y.flatten(0, -2).double() - exact).abs() <= limit + BF16 * (exact.abs() + bias.abs())).all()


def test_an_adapter_a_thousand_times_smaller_than_the_weight_is_not_lost(eight):
    args = eight_bits_case(sizes=(48,), ranks=(8,), scales=[1.0])
    args[5] = [args[5][0] * 1e-3]
    tokens, _, xa, adapters, _ = matrices(args)
    args[2] = [torch.zeros_like(args[2][0])]
    args[2][0][:, -1] = 1.0  # of the weight's size, where x is 0
    args[0][..., -1] = 0.0
    y = provider_in(lora_linear, eight.name).run(*args)[0]
    xa = args[0].double().flatten(0, -2) @ args[4][0].double().t()
    assert error(y.flatten(0, -2), xa @ adapters.t()) < 2 * ADAPTER


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_gradients_of_adapters_are_exact_and_those_of_activations_rounded(eight, own, adapters):
    args = eight_bits_case(bias=True, own=own, adapters=adapters)
    y, xa = lora_linear(*args)
    grad = (torch.randn(y.shape) * torch.randn(*y.shape[:-1], 1).mul(2).exp()).bfloat16()
    got = provider_in(lora_linear.backward_op, eight.name).run(grad, *args, xa)
    reference = lora_linear.backward_op.reference(grad, *args, xa)
    assert len(got) == len(reference) and all((g.shape, g.dtype) == (r.shape, r.dtype) for g, r in zip(got, reference))
    assert all(error(g, r) < 4 * BF16 for g, r in zip(got[1:], reference[1:]))
    _, weight, _, loras, _ = matrices(args)
    g = grad.double().flatten(0, -2)
    gb, a = g @ loras, torch.cat(args[4]).double() * (not own)
    exact, term = g @ weight + gb @ a, gb.abs() @ a.abs()
    if eight is INT8:  # whose weight's scales go into dY
        scales = weight.abs().amax(1)
        limit = rounding(eight, g * scales, (weight / scales[:, None]).t(), gb)
        limit = limit + STEP * (g.abs() * scales).sum(1, keepdim=True)  # the scale is its row's, not its column's
    else:
        limit = (
            rounding(eight, g, weight.t(), gb) + FINEST * gb.abs().amax(1, keepdim=True) * a.abs().max() * g.shape[1]
        )
    limit = limit + (ADAPTER + (BF16 if adapters is torch.bfloat16 else 0) * 2) * term + BF16 * exact.abs()
    assert ((got[0].flatten(0, -2).double() - exact).abs() <= limit).all()


def test_the_whole_error_is_a_few_per_cent(eight):
    args = eight_bits_case(sizes=(256,), ranks=(8,), k=256)
    tokens, weight, xa, adapters, _ = matrices(args)
    assert (
        0.004
        < error(
            provider_in(lora_linear, eight.name).run(*args)[0].flatten(0, -2), tokens @ weight.t() + xa @ adapters.t()
        )
        < 0.05
    )


def test_an_adapter_larger_than_the_weight_saturates_nothing(eight):
    args = eight_bits_case(sizes=(32,), ranks=(4,), scales=[100.0])
    tokens, weight, xa, adapters, _ = matrices(args)
    assert (
        error(
            provider_in(lora_linear, eight.name).run(*args)[0].flatten(0, -2), tokens @ weight.t() + xa @ adapters.t()
        )
        < 2 * ADAPTER
    )


def test_zeros(eight):
    args = eight_bits_case(sizes=(16,), ranks=(4,))
    args[0], args[2], args[5] = (
        torch.zeros_like(args[0]),
        [torch.zeros_like(args[2][0])],
        [torch.zeros_like(args[5][0])],
    )
    y, xa = provider_in(lora_linear, eight.name).run(*args)
    assert (y == 0).all() and all(
        (g == 0).all() for g in provider_in(lora_linear.backward_op, eight.name).run(torch.zeros_like(y), *args, xa)
    )


def test_packed_weights_give_what_their_values_give(eight):
    pytest.importorskip("bitsandbytes")
    from tests.support.ops.arguments import dense_and_packed

    dense, packed = dense_and_packed(torch.bfloat16, True, (32, 16), (4, 2), bias=True)
    ours, theirs = (
        provider_in(lora_linear, eight.name).run(*packed),
        provider_in(lora_linear, eight.name).run(*dense),
    )
    assert all(torch.equal(o, t) for o, t in zip(ours, theirs))
    grad = torch.randn(ours[0].shape).bfloat16()
    ours = provider_in(lora_linear.backward_op, eight.name).run(grad, *packed, ours[1])
    theirs = provider_in(lora_linear.backward_op, eight.name).run(grad, *dense, theirs[1])
    assert all(torch.equal(o, t) for o, t in zip(ours, theirs))


@pytest.mark.parametrize("double", [True, False])
def test_the_bound_of_packed_weights_holds_and_is_near(eight, double):
    pytest.importorskip("bitsandbytes")
    from tests.support.ops.arguments import dense_and_packed
    from tunecompile.ops.frozen_weights import frozen_weights

    dense, packed = dense_and_packed(torch.float32, double, (512, 64), (4, 2))
    weights = frozen_weights(packed[2], packed[-1], [512, 64], 64, torch.float32)
    whole = torch.cat(dense[2]).abs()
    bound, largest = (weights.row_bounds(), whole.amax(1)) if eight is INT8 else (weights.bound(), whole.max())
    assert (largest * 0.9999 <= bound).all() and (bound <= 3 * largest).all()


@pytest.mark.parametrize(
    "change, reason",
    [(lambda a: a[0].half(), "float16"), (lambda a: a[0].float(), "float32"), (lambda a: a[0][..., :56], "16")],
)
def test_what_cannot_be_in_8_bits_runs_as_before_and_says_why(eight, change, reason):
    args = eight_bits_case()
    args[0] = change(args)
    args[2] = [w.to(args[0].dtype)[:, : args[0].shape[-1]] for w in args[2]]
    if eight is INT8 and reason == "float16":
        assert lora_linear.choose(args, "int8").name == lora_linear.choose(args, "8bit").name == "int8"
        return
    assert lora_linear.choose(args, eight.name).name == lora_linear.choose(args).name != eight.name
    assert reason in lora_linear.refusals(args, eight.name)[eight.name]
    assert lora_linear.refusals(args, None)["k_extension"] == note("not-on-gpu")


def test_only_who_asks_gets_it(eight):
    args = eight_bits_case()
    assert (
        lora_linear.choose(args, eight.name).name == eight.name
        and lora_linear.choose(args, "8bit").name == "fp8"
        and lora_linear.choose(args).precision is None
    )
    assert {op.name for op in OPS.values() if any(p.precision == eight.name for p in op.providers)} == {
        "lora_linear",
        "lora_linear_backward",
        "lora_mlp",
        "lora_mlp_backward",
    }


def test_autograd_of_the_op_is_untouched(eight):
    args = eight_bits_case()
    new = [t.detach().requires_grad_() for t in lora_leaves(args)]
    lora_linear(*with_lora_leaves(args, new))[0].sum().backward()
    assert all(t.grad is not None for t in new)


def traced(run, args, mode) -> list[str]:
    """Names of what a provider becomes, for fake tensors."""
    flat, spec = pytree.tree_flatten(list(args))
    where = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def call(*tensors):
        filled = list(flat)
        for i, value in zip(where, tensors):
            filled[i] = value
        return list(run(*pytree.tree_unflatten(filled, spec)))

    return [
        str(node.target)
        for node in trace(call, tuple(flat[i] for i in where), mode).graph.nodes
        if node.op == "call_function"
    ]


@pytest.mark.parametrize(
    "card, version, reason",
    [
        ("rtx4090", "2.11.0", ("known-bug", "pytorch#177651")),
        ("rtx4090", "2.12.0", None),
        ("h100", "2.11.0", None),
        ("rtx3090", "2.13.0", ("fp8-gpu", "8.6")),
        ("rtx5090", "2.13.0", ("fp8-gpu", "12.0")),
        ("t4", "2.13.0", ("fp8-gpu", "7.5")),
    ],
)
def test_which_gpus_take_it(eight, card, version, reason, monkeypatch):
    monkeypatch.setattr(eight_bits, "has_triton", lambda: True)
    monkeypatch.setattr(known_bugs, "installed", lambda package: known_bugs.TorchVersion(version))
    with FakeTensorMode(), acting_as(card):
        refused = eight.refuse(torch.empty(400, 64, dtype=torch.bfloat16, device="cuda"), [32])
    reason = reason if eight is FP8 else ("gpu-without-bfloat16", "") if card == "t4" else None
    assert refused is None if reason is None else (refused.code == reason[0] and reason[1] in str(refused))


def test_few_rows_read_weights_as_they_are(eight):
    pytest.importorskip("triton")
    with FakeTensorMode(), acting_as("h100"):
        few, many, w, a, b = (torch.empty(n, k, dtype=torch.bfloat16, device="cuda") for n, k in SIZES)
        adapted = ([], [w] * 2, [], [a] * 2, [b] * 2, [1.0] * 2, torch.bfloat16, "dense")
        assert lora_linear.choose((few, *adapted), eight.name).name == "few_rows"
        assert lora_linear.choose((many, *adapted), eight.name).name == eight.name


SIZES = ((8, 128), (400, 128), (64, 128), (8, 128), (64, 8))


@pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="interpreted kernels read values, and fake tensors have none"
)
@pytest.mark.parametrize("nested", [True, False])
def test_on_a_gpu_siblings_are_one_product_each_way(eight, nested):
    """Traced for fake GPU tensors, which needs none: torch's own shape rules of the scaled product hold."""
    pytest.importorskip("triton")
    if eight is INT8 and nested and not torch.cuda.is_available():
        pytest.skip("a torch without CUDA looks up no values of fake tensors there")
    k, sizes, ranks = 128, [64, 32, 32], [8, 8, 4]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device="cuda")

        x, grad, xa = fake(2, 5, k, dtype=torch.bfloat16), fake(2, 5, 128, dtype=torch.bfloat16), fake(10, 20)
        blocks = [n * k // 64 for n in sizes]
        packed = [fake(n * k // 2, 1, dtype=torch.uint8) for n in sizes]
        absmax = [fake(m, dtype=torch.uint8 if nested else torch.float32) for m in blocks]
        tables = [[fake(256), fake(-(-m // 256)), fake()] if nested else [] for m in blocks]
        a, b = [fake(r, k) for r in ranks], [fake(n, r) for n, r in zip(sizes, ranks)]
        weights = [fake(n, k, dtype=torch.bfloat16) for n in sizes]
    tensors = [each for i in range(3) for each in (packed[i], absmax[i], *tables[i])]
    for stored, frozen in ((NF4, tensors), (DENSE, weights)):
        args = [x, [], frozen, [], a, b, [1.0] * 3, torch.float32, stored]
        for names, products in (
            (traced(provider_in(lora_linear, eight.name).run, args, mode), 1),  # x A^T
            (traced(provider_in(lora_linear.backward_op, eight.name).run, [grad, *args, xa], mode), 3),  # dY B, dA, dB
        ):
            assert names.count("aten._scaled_mm.default") == (eight is FP8) and "aten._int_mm.default" not in names
            launches = names.count("triton_kernel_wrapper_functional") - products
            assert launches == 2 + len(sizes)  # rows, one weight after the other; adapter, or the product
