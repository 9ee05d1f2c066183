"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) of pairs half a row apart, or of adjacent pairs."""

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op

__all__ = ["rope", "rope_backward", "rotate_half", "rotate_pairs"]


def rotate_half(x: Tensor) -> Tensor:
    """Rotate each pair (x1, x2) by 90 degrees; its members are half a row apart.

    Args:
        x: [..., D], any dtype, D even.

    Returns:
        (-x2, x1), of the same shape and dtype.
    """
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    """Rotate each pair (x1, x2) by 90 degrees; its members are adjacent.

    Args:
        x: [..., D], any dtype, D even.

    Returns:
        -x2 in the place of x1, and x1 in the place of x2; of the same shape and dtype.
    """
    signs = torch.arange(-1, 2, 2, device=x.device, dtype=x.dtype)
    return (x.unflatten(-1, (-1, 2)).flip(-1) * signs).flatten(
        -2
    )  # a flip is an index to Inductor; a stack of slices is a masked load for each member


def turn(x: Tensor, interleaved: bool) -> Tensor:
    return rotate_pairs(x) if interleaved else rotate_half(x)


@op(cost=Cost.POINTWISE)
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x * cos + (x rotated by 90 degrees) * sin, in fp32 or wider and rounded once (arXiv:2104.09864).

    Args:
        x: [B, H, T, D], or any shape that ends in an even D; any floating dtype.
        cos: of the angles, in radians, of each position; broadcasts to x. It gets no gradient.
        sin: of the same angles, in shape and dtype of cos. It gets no gradient.
        interleaved: whether the members of a pair are adjacent (`rotate_pairs`) instead of half a row apart
            (`rotate_half`). cos and sin have the same layout: each angle twice in succession, or all angles twice.

    Returns:
        As x in shape, in the dtype that x and cos promote to.
    """
    dtype = torch.promote_types(x.dtype, cos.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    x, cos, sin = x.to(wide), cos.to(wide), sin.to(wide)
    return (x * cos + turn(x, interleaved) * sin).to(dtype)


@rope.backward(gives=("x",))
def rope_backward(grad, x, cos, sin, interleaved) -> list[Tensor]:
    """The gradient of `rope`: the transposed rotation.

    Args:
        grad: of the result, [B, H, T, D] as that, in its dtype. x gives its dtype only; the others are those of `rope`.

    Returns:
        [dx], in x's dtype.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    g = grad.to(wide)
    return [(g * cos.to(wide) - turn(g * sin.to(wide), interleaved)).to(x.dtype)]
