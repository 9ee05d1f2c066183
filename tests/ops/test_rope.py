"""Rotary embedding: a rotation, and its transpose as gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.checks import DTYPES, LAYOUTS, QUICK, assert_fake_is_real, error, tensor
from tunecompile.ops import rope


def tables(length: int, dim: int, dtype=torch.float64, rows: int = 1):
    angles = torch.rand(rows, 1, length, dim // 2, dtype=torch.float64) * 6
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def formula(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (1, 1, 1, 2), (1, 2, 5, 6)])
def test_gradcheck(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(shape[2], shape[3])
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin), (x,))
    assert torch.equal(rope(x, cos, sin), formula(x, cos, sin))


def test_gradient_with_tables_that_are_no_rotation():
    """The halves of cos and sin need not agree: the gradient is the transpose of whatever they are."""
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(1, 1, 3, 8, dtype=torch.float64), torch.randn(1, 1, 3, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin), (x,))


@given(length=st.integers(0, 5), dim=st.sampled_from([2, 8, 34]), dtype=DTYPES, layout=LAYOUTS, table=DTYPES, rows=st.sampled_from([1, 2]))
@QUICK
def test_any_shape_dtype_and_stride(length, dim, dtype, layout, table, rows):
    torch.manual_seed(0)
    x = tensor((2, 3, length, dim), layout, dtype)
    cos, sin = tables(length, dim, table, rows)
    out = torch.promote_types(dtype, table)
    assert_fake_is_real(rope, x, cos, sin)
    assert_fake_is_real(rope.backward_op, tensor((2, 3, length, dim), layout, out), x, cos, sin)
    leaf = x.detach().requires_grad_()
    got = rope(leaf, cos, sin)
    assert got.dtype == out == formula(x, cos, sin).dtype
    grad = tensor((2, 3, length, dim), dtype=out)
    (ours,) = torch.autograd.grad(got, leaf, grad)
    x64 = x.double().requires_grad_()
    exact = formula(x64, cos.double(), sin.double())
    (wanted,) = torch.autograd.grad(exact, x64, grad.double())
    assert ours.dtype == dtype
    if length:
        assert error(got, exact) < 2 * torch.finfo(out).eps and error(ours, wanted) < 2 * torch.finfo(dtype).eps


def test_transposed_heads_as_attention_has_them():
    x = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    cos, sin = tables(5, 8, torch.float32)
    assert_fake_is_real(rope, x.detach(), cos, sin)
    torch.testing.assert_close(rope(x, cos, sin), formula(x, cos, sin))


def test_opcheck():
    torch.library.opcheck(rope.overload, (torch.randn(1, 2, 3, 8, requires_grad=True), *tables(3, 8, torch.float32)))
