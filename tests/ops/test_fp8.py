"""FP8 products, emulated where there is no GPU: errors within what rounding both operands to e4m3 can do; adapters are not rounded."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.support.ops.arguments import fp8_case, fp8_provider, lora_leaves, with_lora_leaves
from tests.support.ops.checks import error
from tunecompile._torch import known_bugs
from tunecompile._torch.card import acting_as
from tunecompile._torch.fake_tensors import trace
from tunecompile.ir.op import OPS
from tunecompile.notes import note
from tunecompile.ops import fp8, lora_linear, lora_linear_nf4

UNIT = 2.0**-4  # e4m3 rounds by at most this
ADAPTER = 2.0**-7  # two e4m3 numbers a value, and the product that is left out
BF16 = 2.0**-8


def matrices(args):
    """In fp64: tokens, the weight, XA and the adapters side by side, and what is added."""
    x, inputs, weights, biases, a, b, scales, _ = args
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
def test_every_element_is_within_the_rounding_of_its_factors(options):
    args = fp8_case(**options)
    y, xa = fp8_provider(lora_linear).run(*args)
    reference, reference_xa = lora_linear(*args)
    assert (y.shape, y.dtype, y.is_contiguous()) == (reference.shape, reference.dtype, True) and error(
        xa, reference_xa
    ) < BF16
    tokens, weight, exact_xa, adapters, bias = matrices(args)
    exact = tokens @ weight.t() + exact_xa @ adapters.t() + bias
    limit = (
        ((1 + UNIT) ** 2 - 1) * (tokens.abs() @ weight.abs().t())
        + ADAPTER * (exact_xa.abs() @ adapters.abs().t())
        + BF16 * exact.abs()
    )
    limit += (
        fp8.LARGEST**-2 * tokens.abs().amax(1, keepdim=True) * weight.abs().max() * weight.shape[1]
    )  # what is smaller than e4m3's smallest
    assert ((y.flatten(0, -2).double() - exact).abs() <= limit + BF16 * bias.abs()).all()


def test_an_adapter_a_thousand_times_smaller_than_the_weight_is_not_lost():
    args = fp8_case(sizes=(48,), ranks=(8,), scales=[1.0])
    args[5] = [args[5][0] * 1e-3]
    tokens, weight, xa, adapters, _ = matrices(args)

    def exact_product(adapter):
        (x8, x_scale), (w8, w_scale) = (
            fp8.quantize(tokens.bfloat16(), xa.float()),
            fp8.dense_operand(args[2])(adapter.float(), False),
        )
        return x8.double() @ w8.double().t() * x_scale.double() * w_scale.double()

    delta = exact_product(adapters) - exact_product(torch.zeros_like(adapters))
    assert error(delta, xa @ adapters.t()) < 2 * ADAPTER


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_gradients_of_adapters_are_exact_and_those_of_activations_rounded(own, adapters):
    args = fp8_case(bias=True, own=own, adapters=adapters)
    y, xa = lora_linear(*args)
    grad = (torch.randn(y.shape) * torch.randn(*y.shape[:-1], 1).mul(2).exp()).bfloat16()
    got = fp8_provider(lora_linear.backward_op).run(grad, *args, xa)
    reference = lora_linear.backward_op.reference(grad, *args, xa)
    assert len(got) == len(reference) and all((g.shape, g.dtype) == (r.shape, r.dtype) for g, r in zip(got, reference))
    assert all(error(g, r) < 4 * BF16 for g, r in zip(got[1:], reference[1:]))
    _, weight, _, loras, _ = matrices(args)
    g = grad.double().flatten(0, -2)
    gb, a = g @ loras, torch.cat(args[4]).double()
    exact, term = g @ weight, gb.abs() @ a.abs() if not own else 0.0
    exact = exact + gb @ a if not own else exact
    limit = (
        ((1 + UNIT) ** 2 - 1) * (g.abs() @ weight.abs())
        + (ADAPTER + (BF16 if adapters is torch.bfloat16 else 0) * 2) * term
        + BF16 * exact.abs()
    )
    limit += (
        fp8.LARGEST**-2
        * torch.cat([g, gb], 1).abs().amax(1, keepdim=True)
        * max(weight.abs().max(), a.abs().max())
        * g.shape[1]
    )
    assert ((got[0].flatten(0, -2).double() - exact).abs() <= limit).all()


def test_the_whole_error_is_a_few_per_cent():
    args = fp8_case(sizes=(256,), ranks=(8,), k=256)
    tokens, weight, xa, adapters, _ = matrices(args)
    assert (
        0.01
        < error(fp8_provider(lora_linear).run(*args)[0].flatten(0, -2), tokens @ weight.t() + xa @ adapters.t())
        < 0.05
    )


def test_an_adapter_larger_than_the_weight_saturates_nothing():
    args = fp8_case(sizes=(32,), ranks=(4,), scales=[100.0])
    tokens, weight, xa, adapters, _ = matrices(args)
    assert (
        error(fp8_provider(lora_linear).run(*args)[0].flatten(0, -2), tokens @ weight.t() + xa @ adapters.t())
        < 2 * ADAPTER
    )


def test_zeros():
    args = fp8_case(sizes=(16,), ranks=(4,))
    args[0], args[2], args[5] = (
        torch.zeros_like(args[0]),
        [torch.zeros_like(args[2][0])],
        [torch.zeros_like(args[5][0])],
    )
    y, xa = fp8_provider(lora_linear).run(*args)
    assert (y == 0).all() and all(
        (g == 0).all() for g in fp8_provider(lora_linear.backward_op).run(torch.zeros_like(y), *args, xa)
    )


def test_packed_weights_give_what_their_values_give():
    pytest.importorskip("bitsandbytes")
    from tests.support.ops.arguments import dense_and_packed

    dense, packed = dense_and_packed(torch.bfloat16, True, (32, 16), (4, 2), bias=True)
    ours, theirs = fp8_provider(lora_linear_nf4).run(*packed), fp8_provider(lora_linear).run(*dense)
    assert all(torch.equal(o, t) for o, t in zip(ours, theirs))
    grad = torch.randn(ours[0].shape).bfloat16()
    ours = fp8_provider(lora_linear_nf4.backward_op).run(grad, *packed, ours[1])
    theirs = fp8_provider(lora_linear.backward_op).run(grad, *dense, theirs[1])
    assert all(torch.equal(o, t) for o, t in zip(ours, theirs))


@pytest.mark.parametrize("double", [True, False])
def test_the_bound_of_packed_weights_holds_and_is_near(double):
    pytest.importorskip("bitsandbytes")
    from tests.support.ops.arguments import dense_and_packed
    from tunecompile.ops.frozen_weights import PackedWeights

    dense, packed = dense_and_packed(torch.float32, double, (512, 64), (4, 2))
    weights = PackedWeights(*packed[2:7], *packed[12:15], 64, torch.float32)
    bound, largest = weights._largest(), torch.cat(dense[2]).abs().max()
    assert largest * 0.9999 <= bound <= 3 * largest


@pytest.mark.parametrize(
    "change, reason",
    [(lambda a: a[0].half(), "float16"), (lambda a: a[0].float(), "float32"), (lambda a: a[0][..., :56], "16")],
)
def test_what_cannot_be_in_fp8_runs_as_before_and_says_why(change, reason):
    args = fp8_case()
    args[0] = change(args)
    args[2] = [w.to(args[0].dtype)[:, : args[0].shape[-1]] for w in args[2]]
    assert lora_linear.choose(args, "fp8").name == lora_linear.choose(args).name != "fp8"
    assert reason in lora_linear.refusals(args, "fp8")["fp8"]
    assert lora_linear.refusals(args, None) == {"k_extension": note("not-on-gpu")}


def test_only_who_asks_gets_it():
    args = fp8_case()
    assert lora_linear.choose(args, "fp8").name == "fp8" and lora_linear.choose(args).precision is None
    assert {op.name for op in OPS.values() if any(p.precision for p in op.providers)} == {
        "lora_linear",
        "lora_linear_backward",
        "lora_linear_nf4",
        "lora_linear_nf4_backward",
        "lora_mlp",
        "lora_mlp_backward",
    }


def test_autograd_of_the_op_is_untouched():
    args = fp8_case()
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
    ],
)
def test_which_gpus_take_it(card, version, reason, monkeypatch):
    monkeypatch.setattr(fp8, "has_triton", lambda: True)
    monkeypatch.setattr(known_bugs, "installed", lambda package: known_bugs.TorchVersion(version))
    with FakeTensorMode(), acting_as(card):
        refused = fp8.refuse(torch.empty(4, 64, dtype=torch.bfloat16, device="cuda"), [32])
    assert refused is None if reason is None else (refused.code == reason[0] and reason[1] in refused.detail)


@pytest.mark.parametrize("nested", [True, False])
def test_on_a_gpu_siblings_are_one_product_each_way(nested):
    """Traced for fake GPU tensors, which needs none: torch's own shape rules of the scaled product hold."""
    pytest.importorskip("triton")
    k, sizes, ranks = 128, [64, 32, 32], [8, 8, 4]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device="cuda")

        x, grad, xa = fake(2, 5, k, dtype=torch.bfloat16), fake(2, 5, 128, dtype=torch.bfloat16), fake(10, 20)
        blocks = [n * k // 64 for n in sizes]
        packed = [fake(n * k // 2, 1, dtype=torch.uint8) for n in sizes]
        absmax = [fake(m, dtype=torch.uint8 if nested else torch.float32) for m in blocks]
        rest = (
            [[fake(256) for _ in sizes], [fake(-(-m // 256)) for m in blocks], [fake() for _ in sizes]]
            if nested
            else [[], [], []]
        )
        a, b = [fake(r, k) for r in ranks], [fake(n, r) for n, r in zip(sizes, ranks)]
        weights = [fake(n, k, dtype=torch.bfloat16) for n in sizes]
    for op, args in (
        (lora_linear_nf4, [x, [], packed, absmax, *rest, [], a, b, [1.0] * 3, torch.float32, sizes, 64, "nf4"]),
        (lora_linear, [x, [], weights, [], a, b, [1.0] * 3, torch.float32]),
    ):
        for names, products in (
            (traced(fp8_provider(op).run, args, mode), 1),  # x A^T
            (traced(fp8_provider(op.backward_op).run, [grad, *args, xa], mode), 3),  # dY B, dA, dB
        ):
            assert names.count("aten._scaled_mm.default") == 1
            launches = names.count("triton_kernel_wrapper_functional") - products
            assert launches == 2 + len(sizes)  # rows, adapter, one weight after the other
