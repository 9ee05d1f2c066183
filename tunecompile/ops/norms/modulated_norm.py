"""Norms without weights that rows of the batch scale and shift (adaLN; Peebles & Xie, 2023, arXiv:2212.09748)."""

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op
from tunecompile.notes import Note, note
from tunecompile.ops.norms.layer_norm import standardize
from tunecompile.ops.norms.of_sum import of_sum
from tunecompile.ops.norms.rms_norm import compute_dtype, refuse_norm


def _example(draw, before: int = 1) -> list:
    """Two rows of tokens, with scale and shift of their own; `before` tensors of them."""
    wide = [draw.normal(2, draw.rows, draw.width) for _ in range(before)]
    return [*wide, *(draw.normal(2, 1, draw.width) for _ in range(2)), 1e-6, 1.0, True, draw.dtype]


@op(cost=Cost.POINTWISE, example=_example)
def modulated_norm(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, offset: float, centred: bool, dtype: torch.dtype
) -> Tensor:
    """Return norm(x) * (offset + scale) + shift, over the last dimension (arXiv:2212.09748).

    Args:
        x: [..., T, H], any floating dtype. Arithmetic is in `compute_dtype`.
        scale: [..., 1, H], each leading size 1 or x's, any floating dtype.
        shift: as scale.
        eps: added to the variance, or to the mean of squares, in the units of x².
        offset: added to the scale, in its units: 1, or 0 where the model has added it.
        centred: whether the mean is taken off first (LayerNorm), or not (RMSNorm).
        dtype: of the result, floating.

    Returns:
        [..., T, H], in `dtype`, rounded once.
    """
    made = _normed(x, eps, centred)[0]
    return (made * (offset + scale.to(made.dtype)) + shift.to(made.dtype)).to(dtype)


@modulated_norm.backward(gives=("x", "scale", "shift"), widens=True)
def modulated_norm_backward(grad, x, scale, shift, eps, offset, centred) -> list[Tensor]:
    """The gradients of `modulated_norm`. Statistics are recomputed, which is cheaper than reading saved ones.

    Args:
        grad: of the result, [..., T, H] in its dtype. The others are those of `modulated_norm`; of shift only shape and
            dtype count.

    Returns:
        [dx, dscale, dshift], in shape and dtype of x, scale and shift. Sums over rows are in `compute_dtype`.
    """
    dx, *others = _gradients(grad, x, scale, shift, eps, offset, centred)
    return [dx.to(x.dtype), *others]


def _normed(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """(norm of x, what its deviation is divided by), in the dtype of the arithmetic."""
    if centred:
        return standardize(x, eps)
    wide = x.to(compute_dtype(x.dtype))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def _gradients(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, eps: float, offset: float, centred: bool
) -> list[Tensor]:
    """The gradients of x, before rounding, and of scale and shift, behind it."""
    unit, inverse = _normed(x, eps, centred)
    wide = grad.to(unit.dtype)
    scaled = wide * (offset + scale.to(unit.dtype))
    dx = scaled - unit * (scaled * unit).mean(-1, keepdim=True)
    dx = inverse * (dx - scaled.mean(-1, keepdim=True) if centred else dx)
    return [dx, _as(wide * unit, scale), _as(wide, shift)]


def _as(gradient: Tensor, given: Tensor) -> Tensor:
    """Its sum over what was broadcast, in a fixed order."""
    return gradient.sum([i for i, size in enumerate(given.shape) if size == 1], keepdim=True).to(given.dtype)


def _refuse(x: Tensor, gradients: list[Tensor], scale: Tensor, shift: Tensor, *_) -> Note | None:
    if reason := refuse_norm(x, *gradients):
        return reason
    whole = scale.shape == shift.shape and scale.dim() == x.dim() == 3 and scale.stride(-1) == 1
    return None if whole else note("arguments-not-supported")


def _by_template(grad, x, scale, shift, eps, offset, centred, residual_grad, used):
    if not (used[1] or used[2]):  # Inductor joins what reads dX: the gate of the branch before
        given = scale, shift, eps, offset, centred
        if residual_grad is None:
            return modulated_norm_backward.reference(grad, x, *given)
        return add_modulated_norm.backward_op.reference(grad, residual_grad, x, *given)
    how = {"offset": offset, "centred": centred, "residual_grad": residual_grad, "sums": 2}
    dx, *sums = templates.norms.backward(grad, x, scale[:, 0], eps, **how)
    return [dx, *(each[:, None].to(given.dtype) for each, given in zip(sums, (scale, shift)))]


_BECAUSE = "one pass for dX and the partial sums of scale and shift"
add_modulated_norm = of_sum(modulated_norm, _gradients, _by_template, _refuse, _BECAUSE)
