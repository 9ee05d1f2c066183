"""Root mean square layer normalisation (Zhang & Sennrich, 2019, arXiv:1910.07467)."""

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.ir.shape_rule_cache import are_contiguous, contiguous_like
from tunecompile.notes import Note, note
from tunecompile.ops.norms.of_sum import of_sum


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of element-wise arithmetic.

    Args:
        dtype: of a tensor, floating.

    Returns:
        fp32, or fp64 for fp64.
    """
    return torch.promote_types(dtype, torch.float32)


def _shapes(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor | None:
    dtype = torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype
    return x.new_empty(x.shape, dtype=dtype) if are_contiguous(x) else None


def _example(draw, before: int = 1) -> list:
    return [*(draw.hidden() for _ in range(before)), draw.normal(draw.width), 1e-6, 0.0, True]


@op(cost=Cost.POINTWISE, shapes=_shapes, example=_example)
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (offset + weight), over the last dimension (arXiv:1910.07467).

    Args:
        x: [..., H], any floating dtype. Arithmetic is in `compute_dtype`.
        weight: [H], any floating dtype.
        eps: added to the mean of squares, in the units of x².
        offset: added to the weight, in its units: 1 for models that store w - 1 (Gemma), else 0.
        round_first: whether the normalised value is rounded to x's dtype before it is scaled (Llama), or all is
            rounded once (OLMo 2, Gemma).

    Returns:
        [..., H], in x's dtype; with `round_first` in the dtype that x and weight promote to.
    """
    wide = x.to(compute_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_first:
        return (offset + weight if offset else weight) * normed.to(x.dtype)
    return (normed * (offset + weight.to(wide.dtype))).to(x.dtype)


def _backward_shapes(grad: Tensor, x: Tensor, weight: Tensor, *_: object) -> list[Tensor] | None:
    return contiguous_like(x, weight) if are_contiguous(grad, x) else None


@rms_norm.backward(gives=("x", "weight"), shapes=_backward_shapes, widens=True)
def rms_norm_backward(grad, x, weight, eps, offset, round_first) -> list[Tensor]:
    """The gradients of `rms_norm`. 1/rms is recomputed, which is cheaper than reading a saved tensor.

    Args:
        grad: of the result, [..., H] in its dtype. The others are those of `rms_norm`.

    Returns:
        [dx, dweight], in shape and dtype of x and weight; dweight is summed in `compute_dtype`.
    """
    dx, dweight = _gradients(grad, x, weight, eps, offset, round_first)
    return [dx.to(x.dtype), dweight]


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> list[Tensor]:
    """The gradients of x, before it is rounded, and of weight."""
    wide = x.to(compute_dtype(x.dtype))
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * r
    scaled = grad.to(wide.dtype) * (offset + weight.to(wide.dtype))
    dx = r * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    factor = normed.to(x.dtype).to(wide.dtype) if round_first else normed
    return [dx, (grad.to(wide.dtype) * factor).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)]


def _sum_shapes(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor] | None:
    if not are_contiguous(x, residual) or x.dtype != residual.dtype:
        return None
    normed = _shapes(x, weight, eps, offset, round_first)
    return None if normed is None else (normed, x.new_empty(x.shape))


def _sum_gradient_shapes(grad: Tensor, grad_total: Tensor, out1: Tensor, weight: Tensor, *_) -> list[Tensor] | None:
    return contiguous_like(out1, weight) if are_contiguous(grad, grad_total, out1) else None


def refuse_norm(*tensors: Tensor) -> Note | None:
    """Return why the template of a norm's backward cannot take tensors [..., H] like these, or None."""
    if reason := refuse_gpu(*tensors):
        return reason
    if any(t.stride(-1) != 1 for t in tensors):
        return note("row-not-contiguous")
    length = tensors[0].shape[-1]
    return note("rows-too-short", length=length, limit=1024) if length < 1024 else None


def _by_template(grad, x, weight, eps, offset, round_first, residual_grad, used):
    how = {"offset": offset, "round_first": round_first, "residual_grad": residual_grad, "sums": int(used[1])}
    dx, *sums = templates.norms.backward(grad, x, weight, eps, centred=False, **how)
    return [dx, sums[0].to(weight.dtype) if sums else None]


add_rms_norm = of_sum(
    rms_norm,
    _gradients,
    _by_template,
    lambda x, grads, *_: refuse_norm(x, *grads),
    "one pass for dX and the weight's partial sums, and for those of the residual path",
    shapes=(_sum_shapes, _sum_gradient_shapes),
)
