"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), in the rotate-half layout."""

import torch
from torch import Tensor

from tunecompile.op import Cost, op

__all__ = ["rope", "rope_backward", "rotate_half"]


def rotate_half(x: Tensor) -> Tensor:
    """A quarter turn of each pair (x1, x2), whose members lie half a row apart.

    Args:
        x: [..., D], any dtype, D even.

    Returns:
        (-x2, x1), of the same shape and dtype.
    """
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


@op(cost=Cost.POINTWISE)
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin (Su et al., 2021, arXiv:2104.09864), computed in fp32 or wider and rounded once.

    Args:
        x: [B, H, T, D], or any shape that ends in an even D; any floating dtype.
        cos: of the angles, in radians, of each position; broadcasts to x. It gets no gradient.
        sin: of the same angles, in shape and dtype of cos. It gets no gradient.

    Returns:
        As x in shape, in the dtype that x and cos promote to.
    """
    dtype = torch.promote_types(x.dtype, cos.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    x, cos, sin = x.to(wide), cos.to(wide), sin.to(wide)
    return (x * cos + rotate_half(x) * sin).to(dtype)


@rope.backward(saves=("x", "cos", "sin"), gives=("x",))
def rope_backward(grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """The gradient of `rope`: the transposed rotation.

    Args:
        grad: of the result, [B, H, T, D] as that, in its dtype. x gives its dtype only; cos and sin are those of `rope`.

    Returns:
        [dx], in x's dtype.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    g = grad.to(wide)
    return [(g * cos.to(wide) - rotate_half(g * sin.to(wide))).to(x.dtype)]
