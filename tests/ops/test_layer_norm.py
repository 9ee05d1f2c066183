"""LayerNorm: the formula, its gradient, with and without weight and bias."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import DTYPES, LAYOUTS, QUICK, assert_fake_is_real, error, tensor
from tunecompile.ir.op import has_triton
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.ops import add_layer_norm, layer_norm

PARTS = pytest.mark.parametrize("scaled, shifted", [(True, True), (True, False), (False, False)])


def leaves(*shapes, dtype=torch.float64):
    return [None if shape is None else torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@PARTS
@pytest.mark.parametrize("shape", [(2, 3, 8), (8,)])
def test_gradcheck(shape, scaled, shifted):
    width = shape[-1:]
    x, w, b = leaves(shape, width if scaled else None, width if shifted else None)
    given = [each for each in (w, b) if each is not None]

    def of(x, *rest):
        rest = list(rest)
        return layer_norm(x, rest.pop(0) if scaled else None, rest.pop(0) if shifted else None, 1e-3, x.dtype)

    assert torch.autograd.gradcheck(of, (x, *given))
    torch.testing.assert_close(of(x, *given), F.layer_norm(x, width, w, b, 1e-3), rtol=1e-12, atol=1e-12)


@given(
    rows=st.integers(0, 5),
    columns=st.sampled_from([1, 3, 8, 33]),
    dtype=DTYPES,
    layout=LAYOUTS,
    parts=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    huge=st.booleans(),
)
@QUICK
def test_any_shape_dtype_and_stride(rows, columns, dtype, layout, parts, huge):
    torch.manual_seed(0)
    x, grad = (tensor((2, rows, columns), layout, dtype, scale) for scale in (100.0 if huge else 1.0, 1.0))
    w, b = (tensor((columns,), dtype=dtype) if part else None for part in parts)
    assert_fake_is_real(layer_norm, x, w, b, 1e-5, dtype)
    assert_fake_is_real(layer_norm.backward_op, grad, x, w, b, 1e-5)
    assert_fake_is_real(add_layer_norm, x, grad, w, b, 1e-5, dtype)
    made = []
    for wide in (True, False):
        given = [
            each.detach().to(torch.float64 if wide else dtype).requires_grad_()
            for each in (x, w, b)
            if each is not None
        ]
        rest = iter(given[1:])
        weight, bias = (next(rest) if part else None for part in parts)
        run = (
            F.layer_norm(given[0], (columns,), weight, bias, 1e-5)
            if wide
            else layer_norm(given[0], weight, bias, 1e-5, dtype)
        )
        made.append((run, *torch.autograd.grad(run, given, grad.to(run.dtype))))
        assert all(g.dtype == v.dtype and g.shape == v.shape for g, v in zip(made[-1][1:], given))
    if rows and columns > 1:  # one column is its own mean: what is left is rounding
        assert all(error(got, exact) < 4 * torch.finfo(dtype).eps for exact, got in zip(*made))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("read", ["both", "norm", "total"])
def test_add_is_the_add_and_the_norm(dtype, read):
    made = []
    for joined in (True, False):
        torch.manual_seed(0)
        x, r, w, b = (tensor(s, dtype=dtype).requires_grad_() for s in ((4, 7, 16), (4, 7, 16), (16,), (16,)))
        total = x + r
        normed, total = (
            add_layer_norm(x, r, w, b, 1e-6, dtype) if joined else (layer_norm(total, w, b, 1e-6, dtype), total)
        )
        loss = (normed * 0.5 if read != "total" else 0) + (total * 3 if read != "norm" else 0)
        loss.sum().backward()
        trained = (x, r, w, b) if read != "total" else (x, r)
        made.append((normed.detach(), total.detach(), *(each.grad for each in trained)))
    for i, (got, expected) in enumerate(zip(*made)):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected) if i < 2 else error(got, expected) < torch.finfo(dtype).eps


def test_opcheck():
    torch.library.opcheck(layer_norm.overload, (*leaves((2, 8), 8, None, dtype=torch.float32), 1e-6, torch.float32))
    torch.library.opcheck(
        add_layer_norm.overload, (*leaves((2, 8), (2, 8), 8, 8, dtype=torch.float32), 1e-6, torch.float32)
    )


@given(
    rows=st.integers(0, 5),
    x=DTYPES,
    weights=DTYPES,
    made=st.sampled_from([torch.float32, torch.bfloat16]),
    add=st.booleans(),
)
@QUICK
def test_a_result_of_another_dtype(rows, x, weights, made, add):
    """As under autocast: the same numbers, rounded to that dtype once, and gradients in the dtypes of what they are of."""
    torch.manual_seed(0)
    given = [
        tensor(shape, dtype=dtype).requires_grad_()
        for shape, dtype in (((rows, 8), x), ((8,), weights), ((8,), weights))
    ]
    wide = [each.detach().double().requires_grad_() for each in given]
    op = (lambda x, *rest: add_layer_norm(x, torch.zeros_like(x), *rest)[0]) if add else layer_norm
    out, exact = op(*given, 1e-5, made), F.layer_norm(wide[0], (8,), *wide[1:], 1e-5)
    unrounded = op(*given, 1e-5, torch.float32)
    assert out.dtype is made and torch.equal(out, unrounded.to(made))
    grad = torch.randn(out.shape).to(made)
    got, wanted = torch.autograd.grad(out, given, grad), torch.autograd.grad(exact, wide, grad.double())
    assert [each.dtype for each in got] == [x, weights, weights]
    if rows:
        assert error(unrounded, exact) < 1e-6
        assert all(error(g, e) < 4 * torch.finfo(v.dtype).eps for g, e, v in zip(got, wanted, given))


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_no_template_takes_gradients_of_another_dtype():
    """Of a norm in bf16 whose result is in fp32: no GPU has timed it, and Inductor fuses the casts."""
    x, wide = (torch.empty(4, 2048, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    w = torch.empty(2048, dtype=torch.bfloat16)
    with as_on_gpu():
        for grad, chosen in ((x, ["triton", "triton"]), (wide, ["reference", "reference"])):
            calls = (layer_norm, (grad, x, w, w, 1e-5)), (add_layer_norm, (grad, x, x, w, w, 1e-5))
            assert [op.backward_op.choose(args).name for op, args in calls] == chosen
