"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), in the rotate-half layout."""

import torch
from torch import Tensor

from tunecompile.op import Cost, op


def rotate_half(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1), halves of the last dimension."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


@op(cost=Cost.POINTWISE)
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin. x: [B, H, T, D]; cos, sin broadcast to it. Result in the promoted dtype of all three."""
    dtype = torch.promote_types(x.dtype, cos.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    x, cos, sin = x.to(wide), cos.to(wide), sin.to(wide)
    return (x * cos + rotate_half(x) * sin).to(dtype)


@rope.backward(saves=("x", "cos", "sin"), gives=("x",))
def rope_backward(grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """[dx]: the transposed rotation. `x` gives its dtype only."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    g = grad.to(wide)
    return [(g * cos.to(wide) - rotate_half(g * sin.to(wide))).to(x.dtype)]
