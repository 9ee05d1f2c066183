"""Layer normalisation (Ba, Kiros & Hinton, 2016, arXiv:1607.06450), with or without weight and bias."""

from typing import Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op
from tunecompile.ops.norms.of_sum import of_sum
from tunecompile.ops.norms.rms_norm import compute_dtype, refuse_norm


def _example(draw, before: int = 1) -> list:
    return [*(draw.hidden() for _ in range(before)), draw.normal(draw.width), draw.normal(draw.width), 1e-6, draw.dtype]


@op(cost=Cost.POINTWISE, example=_example)
def layer_norm(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, dtype: torch.dtype) -> Tensor:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension (arXiv:1607.06450).

    Args:
        x: [..., H], any floating dtype. Arithmetic is in `compute_dtype`.
        weight: [H], any floating dtype, or None.
        bias: [H], any floating dtype, or None.
        eps: added to the variance, in the units of x².
        dtype: of the result, floating: x's own, or fp32 for x in half precision, as under autocast on a GPU.

    Returns:
        [..., H], in `dtype`, rounded once.
    """
    made = standardize(x, eps)[0]
    made = made if weight is None else made * weight.to(made.dtype)
    made = made if bias is None else made + bias.to(made.dtype)
    return made.to(dtype)


@layer_norm.backward(gives=("x", "weight", "bias"), widens=True)
def layer_norm_backward(grad, x, weight, bias, eps) -> list[Tensor]:
    """The gradients of `layer_norm`. Mean and variance are recomputed, which is cheaper than reading saved ones.

    Args:
        grad: of the result, [..., H] in its dtype. The others are those of `layer_norm`; of bias only the dtype counts.

    Returns:
        [dx, dweight, dbias], in shape and dtype of x, weight and bias; empty for one that is None. Sums over rows are
        in `compute_dtype`.
    """
    dx, *others = _gradients(grad, x, weight, bias, eps)
    return [dx.to(x.dtype), *others]


def standardize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ((x - mean) / deviation, 1 / deviation) over the last dimension, in the dtype of the arithmetic."""
    wide = x.to(compute_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * inverse, inverse


def _gradients(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> list[Tensor]:
    """The gradients of x, before it is rounded, and of weight and bias."""
    normed, inverse = standardize(x, eps)
    wide = grad.to(normed.dtype)
    scaled = wide if weight is None else wide * weight.to(normed.dtype)
    share = (scaled * normed).mean(-1, keepdim=True)
    dx = inverse * (scaled - scaled.mean(-1, keepdim=True) - normed * share)
    width = x.shape[-1]
    sums = (each.reshape(-1, width).sum(0) for each in (wide * normed, wide))
    return [dx, *map(_as, sums, (weight, bias))]


def _as(gradient: Tensor, parameter: Tensor | None) -> Tensor:
    return gradient.new_zeros(0) if parameter is None else gradient.to(parameter.dtype)


def _by_template(grad, x, weight, bias, eps, residual_grad, used):
    dx, *sums = templates.norms.backward(
        grad, x, weight, eps, residual_grad=residual_grad, sums=2 if any(used[1:]) else 0
    )
    read = zip(sums or (None, None), (weight, bias), used[1:])
    return [dx, *(_as(each, given) if is_read else None for each, given, is_read in read)]


add_layer_norm = of_sum(
    layer_norm,
    _gradients,
    _by_template,
    lambda x, grads, *_: refuse_norm(x, *grads),
    "one pass for dX and the partial sums of weight and bias, and for the residual path",
)
