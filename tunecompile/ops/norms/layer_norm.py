"""Layer normalisation (Ba, Kiros & Hinton, 2016, arXiv:1607.06450), with or without weight and bias."""

from functools import partial
from typing import Optional

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op
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
    dx, dweight, dbias = _gradients(grad, x, weight, eps)
    return [dx.to(x.dtype), _as(dweight, weight), _as(dbias, bias)]


def standardize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ((x - mean) / deviation, 1 / deviation) over the last dimension, in the dtype of the arithmetic."""
    wide = x.to(compute_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * inverse, inverse


def _gradients(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients before rounding, in the dtype of the arithmetic."""
    normed, inverse = standardize(x, eps)
    wide = grad.to(normed.dtype)
    scaled = wide if weight is None else wide * weight.to(normed.dtype)
    share = (scaled * normed).mean(-1, keepdim=True)
    dx = inverse * (scaled - scaled.mean(-1, keepdim=True) - normed * share)
    width = x.shape[-1]
    return dx, (wide * normed).reshape(-1, width).sum(0), wide.reshape(-1, width).sum(0)


def _as(gradient: Tensor, parameter: Tensor | None) -> Tensor:
    return gradient.new_zeros(0) if parameter is None else gradient.to(parameter.dtype)


@op(cost=Cost.POINTWISE, example=partial(_example, before=2))
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return a residual sum and its norm: one read of each, and one pass for both gradients (arXiv:1607.06450).

    Args:
        x: [..., H], any floating dtype.
        residual: as x, in shape and dtype.
        weight: [H], or None. This, bias, eps (in the units of x²) and dtype (of the norm): as for `layer_norm`.

    Returns:
        (`layer_norm` of total, total), with total = x + residual, rounded to their dtype: which the next residual
        addition reads."""
    total = x + residual
    return layer_norm.reference(total, weight, bias, eps, dtype), total


@add_layer_norm.backward(gives=(("x", "residual"), "weight", "bias"), outputs=2, widens=True)
def add_layer_norm_backward(grad, grad_total, out1, weight, bias, eps) -> list[Tensor]:
    """The gradients of `add_layer_norm`: those of the norm and of the residual path are added before rounding.

    Args:
        grad: of the norm, [..., H] in its dtype.
        grad_total: of the sum, as out1.
        out1: the sum, x + residual. The others are those of `add_layer_norm`.

    Returns:
        [dtotal, dweight, dbias], in shape and dtype of out1, weight and bias; empty for one that is None. The
        first is the gradient of both x and residual.
    """
    dx, dweight, dbias = _gradients(grad, out1, weight, eps)
    return [(dx + grad_total).to(out1.dtype), _as(dweight, weight), _as(dbias, bias)]


@layer_norm_backward.provider(
    "triton",
    because="one pass for dX and the partial sums of weight and bias",
    refuses=lambda grad, x, *_: refuse_norm(x, grad),
)
def _(grad, x, weight, bias, eps, *, used):
    return _by_template(grad, None, x, weight, bias, eps, used)


@add_layer_norm_backward.provider(
    "triton",
    because="one pass for both paths' dX and the partial sums of weight and bias",
    refuses=lambda grad, grad_total, out1, *_: refuse_norm(out1, grad, grad_total),
)
def _(grad, grad_total, out1, weight, bias, eps, *, used):
    return _by_template(grad, grad_total, out1, weight, bias, eps, used)


def _by_template(grad, grad_total, x, weight, bias, eps, used):
    from tunecompile.templates import norms

    dx, *sums = norms.backward(grad, x, weight, eps, residual_grad=grad_total, sums=2 if any(used[1:]) else 0)
    read = zip(sums or (None, None), (weight, bias), used[1:])
    return [dx, *(_as(each, given) if is_read else None for each, given, is_read in read)]
