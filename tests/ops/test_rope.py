"""Rotary embedding: a rotation, and its transpose as gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import DTYPES, LAYOUTS, QUICK, assert_fake_is_real, error, tensor
from tunecompile.ops import rope
from tunecompile.ops.rope import rotate_half, rotate_pairs


def tables(length: int, dim: int, dtype=torch.float64, rows: int = 1, interleaved: bool = False):
    angles = torch.rand(rows, 1, length, dim // 2, dtype=torch.float64) * 6
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def formula(x, cos, sin, interleaved):
    half = x.shape[-1] // 2
    if interleaved:
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


both = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])


@both
@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (1, 1, 1, 2), (1, 2, 5, 6)])
def test_gradcheck(shape, interleaved):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(shape[2], shape[3], interleaved=interleaved)
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin, interleaved), (x,))
    assert torch.equal(rope(x, cos, sin, interleaved), formula(x, cos, sin, interleaved))


@both
def test_gradient_with_tables_that_are_no_rotation(interleaved):
    """The members' cos and sin need not agree: the gradient is the transpose of whatever they are."""
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(1, 1, 3, 8, dtype=torch.float64), torch.randn(1, 1, 3, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rope(x, cos, sin, interleaved), (x,))


@both
def test_a_rotation_keeps_lengths_and_its_gradient_turns_back(interleaved):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    turned = rope(x, *tables(5, 8, interleaved=interleaved), interleaved)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    (back,) = torch.autograd.grad(turned, x, turned.detach())
    torch.testing.assert_close(back, x.detach())


def test_the_layouts_are_one_rotation_of_permuted_elements():
    order = torch.arange(8).view(2, 4).t().flatten()  # 0 4 1 5 2 6 3 7
    x, (cos, sin) = torch.randn(2, 3, 5, 8), tables(5, 8, torch.float32)
    assert torch.equal(
        rope(x, cos, sin, False)[..., order], rope(x[..., order], cos[..., order], sin[..., order], True)
    )
    assert torch.equal(rotate_half(x)[..., order], rotate_pairs(x[..., order]))


@given(
    length=st.integers(0, 5),
    dim=st.sampled_from([2, 8, 34]),
    dtype=DTYPES,
    layout=LAYOUTS,
    table=DTYPES,
    rows=st.sampled_from([1, 2]),
    interleaved=st.booleans(),
)
@QUICK
def test_any_shape_dtype_and_stride(length, dim, dtype, layout, table, rows, interleaved):
    torch.manual_seed(0)
    x = tensor((2, 3, length, dim), layout, dtype)
    cos, sin = tables(length, dim, table, rows, interleaved)
    out = torch.promote_types(dtype, table)
    assert_fake_is_real(rope, x, cos, sin, interleaved)
    assert_fake_is_real(rope.backward_op, tensor((2, 3, length, dim), layout, out), x, cos, sin, interleaved)
    leaf = x.detach().requires_grad_()
    got = rope(leaf, cos, sin, interleaved)
    assert got.dtype == out == formula(x, cos, sin, interleaved).dtype
    grad = tensor((2, 3, length, dim), dtype=out)
    (ours,) = torch.autograd.grad(got, leaf, grad)
    x64 = x.double().requires_grad_()
    exact = formula(x64, cos.double(), sin.double(), interleaved)
    (wanted,) = torch.autograd.grad(exact, x64, grad.double())
    assert ours.dtype == dtype
    if length:
        assert error(got, exact) < 2 * torch.finfo(out).eps and error(ours, wanted) < 2 * torch.finfo(dtype).eps


@both
def test_transposed_heads_as_attention_has_them(interleaved):
    x = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    cos, sin = tables(5, 8, torch.float32, interleaved=interleaved)
    assert_fake_is_real(rope, x.detach(), cos, sin, interleaved)
    torch.testing.assert_close(rope(x, cos, sin, interleaved), formula(x, cos, sin, interleaved))


@both
def test_opcheck(interleaved):
    torch.library.opcheck(
        rope.overload,
        (
            torch.randn(1, 2, 3, 8, requires_grad=True),
            *tables(3, 8, torch.float32, interleaved=interleaved),
            interleaved,
        ),
    )
