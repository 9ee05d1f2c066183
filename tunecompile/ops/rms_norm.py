"""Root mean square layer normalisation (Zhang & Sennrich, 2019, arXiv:1910.07467)."""

import torch
from torch import Tensor

from tunecompile.op import Cost, op


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Element-wise arithmetic runs in fp32, and in fp64 for fp64 tensors."""
    return torch.promote_types(dtype, torch.float32)


@op(cost=Cost.POINTWISE)
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), over the last dimension.

    x: [..., H], weight: [H]. `offset` is 1 for models whose weight is stored as w - 1.
    `round_first`: the normalised value is rounded to x's dtype before it is scaled (the result then has the promoted dtype of
    x and weight); else everything is computed in fp32 and rounded once, to x's dtype.
    """
    wide = x.to(compute_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_first:
        return (offset + weight if offset else weight) * normed.to(x.dtype)
    return (normed * (offset + weight.to(wide.dtype))).to(x.dtype)


@rms_norm.backward(saves=("x", "weight", "eps", "offset", "round_first"), gives=("x", "weight"))
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> list[Tensor]:
    """[dx: as x, dweight: as weight]. 1/rms is computed again: cheaper than one more tensor to read."""
    wide = x.to(compute_dtype(x.dtype))
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * r
    scaled = grad.to(wide.dtype) * (offset + weight.to(wide.dtype))
    dx = r * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    factor = normed.to(x.dtype).to(wide.dtype) if round_first else normed
    dweight = (grad.to(wide.dtype) * factor).reshape(-1, weight.shape[0]).sum(0)
    return [dx.to(x.dtype), dweight.to(weight.dtype)]
