"""LoRA linears: one or several siblings, with bias, dropped-out inputs, fp32 adapters on a half-precision base."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.arguments import lora_arguments, lora_leaves, with_lora_leaves
from tests.support.ops.checks import (
    DTYPES,
    LAYOUTS,
    QUICK,
    assert_fake_is_real,
    assert_provider_is_exact,
    error,
    tensor,
)
from tunecompile.ops import frozen_weights, lora_linear
from tunecompile.ops.frozen_weights import DenseWeights

FORWARD, BACKWARD = "k_extension", "grouped"


def formula(x, inputs, weights, biases, a, b, scales, dtype, stored):
    ys = []
    for i, w in enumerate(weights):
        source = inputs[i] if inputs else x
        ys.append(F.linear(x, w, biases[i] if biases else None) + F.linear(F.linear(source, a[i]), b[i]) * scales[i])
    return torch.cat(ys, -1)


CASES = [
    dict(),
    dict(bias=True),
    dict(own=True),
    dict(sizes=(6, 3, 5), ranks=(2, 1, 3), bias=True, own=True),
    dict(sizes=(4, 4), ranks=(2, 2)),
    dict(sizes=(1,), ranks=(1,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (4, 5), (1, 1)])
def test_gradcheck(shape, case):
    args = lora_arguments(torch.randn(shape, dtype=torch.float64), **case)
    new = [t.detach().requires_grad_() for t in lora_leaves(args)]
    assert torch.autograd.gradcheck(lambda *n: lora_linear(*with_lora_leaves(args, n))[0], new)
    torch.testing.assert_close(lora_linear(*args)[0], formula(*args), rtol=1e-12, atol=1e-13)
    xa = torch.cat(
        [F.linear(args[1][i] if args[1] else args[0], m).reshape(-1, m.shape[0]) for i, m in enumerate(args[4])], 1
    )
    torch.testing.assert_close(lora_linear(*args)[1], xa, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_gradients_have_fp64_precision(case):
    args = lora_arguments(torch.randn(3, 7, dtype=torch.float64), **case)
    got, exact = ([t.detach().requires_grad_() for t in lora_leaves(args)] for _ in range(2))
    weight = torch.randn(3, sum(w.shape[0] for w in args[2]), dtype=torch.float64)
    (lora_linear(*with_lora_leaves(args, got))[0] * weight).sum().backward()
    (formula(*with_lora_leaves(args, exact)) * weight).sum().backward()
    assert max(error(g.grad, e.grad) for g, e in zip(got, exact)) < 1e-13


def backward_arguments(args, layout="contiguous"):
    y, xa = lora_linear(*args)
    return [tensor(tuple(y.shape), layout, y.dtype), *args, xa]


@given(
    rows=st.integers(0, 5),
    k=st.sampled_from([1, 5, 16]),
    siblings=st.lists(st.tuples(st.sampled_from([1, 3, 8]), st.integers(1, 4)), min_size=1, max_size=3),
    dtype=DTYPES,
    layout=LAYOUTS,
    bias=st.booleans(),
    own=st.booleans(),
    wide=st.booleans(),
)
@QUICK
def test_any_shape_dtype_and_stride(rows, k, siblings, dtype, layout, bias, own, wide):
    """Fakes tell the truth, and both providers are as exact as the reference, on fp32 adapters too."""
    torch.manual_seed(0)
    sizes, ranks = zip(*siblings)
    adapters = torch.float32 if wide else dtype
    args = lora_arguments(tensor((2, rows, k), layout, dtype), sizes, ranks, bias, own, adapters, adapters)
    assert_fake_is_real(lora_linear, *args)
    assert_fake_is_real(lora_linear.backward_op, *backward_arguments(args, layout))


@pytest.mark.parametrize("adapters", ["same", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case",
    [
        dict(sizes=(48,), ranks=(8,)),
        dict(sizes=(48, 16, 16), ranks=(8, 4, 8), bias=True),
        dict(sizes=(32, 32), ranks=(8, 2), own=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [40, 3])
def test_providers_are_as_exact_as_the_reference(case, dtype, adapters, rows, monkeypatch):
    monkeypatch.setattr(frozen_weights, "TILES", 0)
    adapters = torch.float32 if adapters == "fp32" else dtype
    args = lora_arguments(tensor((2, rows, 64), "strided", dtype), dtype=adapters, adapters=adapters, **case)
    copied = rows == 40
    weights = DenseWeights(args[2], [*case["sizes"]], 64)
    assert (weights.without_copy(2 * rows) is None, not weights.adds(2 * rows)) == (copied, copied)
    assert_provider_is_exact(lora_linear, FORWARD, *args)
    assert_provider_is_exact(lora_linear.backward_op, BACKWARD, *backward_arguments(args))


@pytest.mark.parametrize(
    "rows, columns, tokens, alone, adds",
    [
        ([14336, 14336], 4096, 1024, True, True),  # gate and up of Llama's 8B
        ([14336, 14336], 4096, 4096, False, True),
        ([14336, 14336], 4096, 8192, False, True),
        ([14336, 14336], 4096, 16384, False, False),
        ([4096, 1024, 1024], 4096, 1024, False, True),  # q, k, v: products with k and v would leave a GPU idle
        ([4096], 14336, 1024, True, True),
        ([4096], 14336, 4096, True, False),
    ],
)
def test_weights_are_copied_where_that_moves_fewer_bytes(rows, columns, tokens, alone, adds):
    weights = DenseWeights([torch.empty(n, columns, device="meta") for n in rows], rows, columns)
    assert (weights.without_copy(tokens) is not None, weights.adds(tokens)) == (alone, adds)


@pytest.mark.parametrize("sizes", [(48,), (48, 16)])
def test_weights_that_are_stored_the_other_way_round(sizes):
    args = lora_arguments(tensor((2, 40, 64), dtype=torch.bfloat16), sizes, (8, 4)[: len(sizes)], bias=True)
    args[2] = [weight.t().contiguous().t() for weight in args[2]]
    assert_provider_is_exact(lora_linear, FORWARD, *args)
    assert_provider_is_exact(lora_linear.backward_op, BACKWARD, *backward_arguments(args))


@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [False, True])
def test_half_precision_is_no_worse_than_peft(own, adapters):
    """PEFT's two rounded results added, on the same numbers, where the adapter's share is smaller than the base's."""
    args = lora_arguments(tensor((3, 20, 64), dtype=torch.bfloat16), (32, 16), (8, 4), True, own, adapters, adapters)
    args[5] = [m * 0.1 for m in args[5]]

    def peft(x, inputs, weights, biases, a, b, scales, dtype, stored):
        ys = []
        for i, w in enumerate(weights):
            source = (inputs[i] if inputs else x).to(a[i].dtype)
            ys.append((F.linear(x, w, biases[i]) + F.linear(F.linear(source, a[i]), b[i]) * scales[i]).to(x.dtype))
        return torch.cat(ys, -1)

    ours, theirs, exact = (
        [t.detach().to(d or t.dtype).requires_grad_() for t in lora_leaves(args)] for d in (None, None, torch.float64)
    )
    args64 = [
        v.double()
        if isinstance(v, torch.Tensor)
        else [m.double() if isinstance(m, torch.Tensor) else m for m in v]
        if isinstance(v, list)
        else torch.float64
        for v in args
    ]
    grad = torch.randn(3, 20, 48).bfloat16()
    ys = [
        lora_linear(*with_lora_leaves(args, ours))[0],
        peft(*with_lora_leaves(args, theirs)),
        peft(*with_lora_leaves(args64, exact)),
    ]
    for y, g in zip(ys, (grad, grad, grad.double())):
        y.backward(g)
    assert ys[0].dtype == ys[1].dtype and error(ys[0], ys[2]) <= 1.05 * error(ys[1], ys[2])
    for o, t, e in zip(ours, theirs, exact):
        assert o.grad.dtype == o.dtype
        assert error(o.grad, e.grad) <= 1.2 * max(error(t.grad, e.grad), torch.finfo(o.dtype).eps / 2)


def test_frozen_and_trained_inputs_in_any_mix():
    args = lora_arguments(torch.randn(3, 5, dtype=torch.float64), (4, 3), (2, 1), bias=True, own=True)
    for mask in range(1, 2 ** len(lora_leaves(args)), 37):

        def fresh():
            return [t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(lora_leaves(args))]

        ours, exact = fresh(), fresh()
        lora_linear(*with_lora_leaves(args, ours))[0].square().sum().backward()
        formula(*with_lora_leaves(args, exact)).square().sum().backward()
        for o, e in zip(ours, exact):
            assert (o.grad is None) == (e.grad is None)
            if e.grad is not None:
                torch.testing.assert_close(o.grad, e.grad, rtol=1e-5, atol=1e-6)


def test_xa_has_no_gradient_and_an_expanded_one_works():
    args = lora_arguments(torch.randn(3, 5), (4,), (2,))
    x = args[0].requires_grad_()
    y, xa = lora_linear(*args)
    assert not xa.requires_grad
    y.sum().backward()
    expected = (args[2][0] + args[6][0] * args[5][0] @ args[4][0]).sum(0).expand(3, 5)
    torch.testing.assert_close(x.grad, expected)


def test_opcheck():
    args = lora_arguments(torch.randn(3, 5), (4, 3), (2, 1), bias=True, own=True)
    torch.library.opcheck(
        lora_linear.overload, tuple(with_lora_leaves(args, [t.detach().requires_grad_() for t in lora_leaves(args)]))
    )


def test_flops():
    args = lora_arguments(torch.randn(2, 3, 5), (4, 3), (2, 1))
    assert lora_linear.flops(*args) == 2 * 6 * 5 * 7
    assert lora_linear.backward_op.flops(*backward_arguments(args)) == 2 * 6 * 5 * 7
