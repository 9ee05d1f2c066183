"""LayerNorm: the formula, its gradient, with and without weight and bias."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import DTYPES, LAYOUTS, QUICK, assert_fake_is_real, error, tensor
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
        return layer_norm(x, rest.pop(0) if scaled else None, rest.pop(0) if shifted else None, 1e-3)

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
    assert_fake_is_real(layer_norm, x, w, b, 1e-5)
    assert_fake_is_real(layer_norm.backward_op, grad, x, w, b, 1e-5)
    assert_fake_is_real(add_layer_norm, x, grad, w, b, 1e-5)
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
            F.layer_norm(given[0], (columns,), weight, bias, 1e-5) if wide else layer_norm(given[0], weight, bias, 1e-5)
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
        normed, total = add_layer_norm(x, r, w, b, 1e-6) if joined else (layer_norm(total, w, b, 1e-6), total)
        loss = (normed * 0.5 if read != "total" else 0) + (total * 3 if read != "norm" else 0)
        loss.sum().backward()
        trained = (x, r, w, b) if read != "total" else (x, r)
        made.append((normed.detach(), total.detach(), *(each.grad for each in trained)))
    for i, (got, expected) in enumerate(zip(*made)):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected) if i < 2 else error(got, expected) < torch.finfo(dtype).eps


def test_opcheck():
    torch.library.opcheck(layer_norm.overload, (*leaves((2, 8), 8, None, dtype=torch.float32), 1e-6))
    torch.library.opcheck(add_layer_norm.overload, (*leaves((2, 8), (2, 8), 8, 8, dtype=torch.float32), 1e-6))
