"""The cross-entropy of each row of a chunk of logits, and its gradient, as the ops of heads compute them."""

import torch
from torch import Tensor

from tunecompile.ir.op import has_triton

__all__ = ["losses_and_gradient"]


def losses_and_gradient(
    logits: Tensor,
    target: Tensor,
    scale: float,
    softcap: float,
    ignore_index: int,
    label_smoothing: float,
    factors: Tensor | None = None,
    gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """The loss of each row and, with `gradient`, d(sum of factors times losses)/d(logits) in the dtype of the logits.

    The logits may be overwritten.
    """
    if logits.is_cuda and scale > 0 and has_triton():
        from tunecompile.templates import cross_entropy

        losses, _ = cross_entropy.loss_and_grad_(
            logits,
            target,
            ignore_index=ignore_index,
            softcap=softcap or None,
            scale=scale,
            label_smoothing=label_smoothing,
            grad=gradient,
            factors=factors,
        )
        return losses, logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z, t = wide * scale if scale != 1.0 else wide, None
    if softcap:
        t = torch.tanh(z / softcap)
        z = t * softcap
    logp = torch.log_softmax(z, -1)
    labelled = target != ignore_index
    safe = torch.where(labelled, target, 0)[:, None]
    picked, vocabulary = -logp.gather(1, safe), logits.shape[-1]
    smooth = -logp.mean(-1, keepdim=True) if label_smoothing else 0.0
    losses = (((1 - label_smoothing) * picked + label_smoothing * smooth) * labelled[:, None]).flatten()
    if not gradient:
        return losses, logits
    d = logp.exp_()
    d.scatter_add_(1, safe, torch.full_like(picked, label_smoothing - 1))
    if label_smoothing:
        d.sub_(label_smoothing / vocabulary)
    d.mul_(labelled[:, None] if factors is None else torch.where(labelled, factors, 0)[:, None])
    if t is not None:
        d = d * (1 - t * t)
    if scale != 1.0:
        d = d * scale
    return losses, d.to(logits.dtype)
