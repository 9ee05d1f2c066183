"""Log-probabilities of labels, and statistics of the distributions that they are of, without logits.

One code scores a policy, its former self and a reference: with equal weights and hidden states the log-probabilities
are the same to the bit, whether gradients are on or off, so that their ratio is 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunecompile._torch.autograd import no_autocast
from tunecompile._torch.modules import linear
from tunecompile.ops.linear_cross_entropy import (
    NO_LABEL,
    RAISED,
    STATISTICS,
    add_gradients,
    by_torch,
    chunk_rows,
    raised,
    runs_template,
)


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    softcap: float,
    wanted: Sequence[str],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each label's log-probability under softmax(softcap(scale * logits)), and statistics of the same rows.

    The log-probabilities and the entropy are differentiable.

    Args:
        hidden: [T, H], any floating dtype.
        weight: [V, H], in hidden's dtype; bias: [V], the same, or None.
        labels: int64 [T]; every row has one.
        scale: a factor of the logits.
        softcap: c of c * tanh(scale * logits / c); 0 for none.
        wanted: names from `STATISTICS`.

    Returns:
        (log-probabilities, statistics by name): [T] each, in fp32, or fp64 for fp64; "is_top1" is of bools.
    """
    names = tuple(name for name in STATISTICS if name in wanted)
    trains_head = weight.requires_grad or (bias is not None and bias.requires_grad)
    ahead = torch.is_grad_enabled() and hidden.requires_grad and not trains_head  # off inside of `forward`
    log_probs, *values = _TokenScores.apply(hidden, weight, bias, labels, scale, softcap, names, ahead)
    return log_probs, dict(zip(names, values))


class _TokenScores(torch.autograd.Function):
    """Under a frozen head the gradient of a row's hidden state is that of its log-probability times one number, so it
    is computed in the forward pass, where the logits are at hand. Else, and for a gradient of the entropy, which loops
    seldom use, each chunk of logits is made once more."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, labels, scale, softcap, names, ahead):
        ctx.set_materialize_grads(False)
        with no_autocast(), torch.no_grad():
            log_probs, values, dhidden = _score(hidden, weight, bias, labels, scale, softcap, names, ahead)
        ctx.save_for_backward(hidden, weight, bias, labels, dhidden)
        ctx.scale, ctx.softcap = scale, softcap
        ctx.mark_non_differentiable(*(values[name] for name in names if name != "entropy"))
        return log_probs, *(values[name] for name in names)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, *rest):
        hidden, weight, bias, labels, dhidden = ctx.saved_tensors
        # of the statistics only the first, the entropy, has a gradient
        entropy = next((each for each in rest if each is not None), None)
        if grad is None and entropy is None:
            return (None,) * 8
        if dhidden is not None and entropy is None:
            return (dhidden * grad[:, None]).to(hidden.dtype), *(None,) * 7
        with no_autocast():
            made = _gradients(ctx, hidden, weight, bias, labels, grad, entropy)
        return *made, *(None,) * 5


def _parts(rows: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, rows, step)]


def _score(hidden, weight, bias, labels, scale, softcap, names, ahead) -> tuple[Tensor, dict, Tensor | None]:
    """(log-probabilities, statistics, the gradient of their sum at the hidden states if `ahead`)."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    log_probs = torch.empty(hidden.shape[:1], dtype=wide, device=hidden.device)
    values = {name: torch.empty_like(log_probs, dtype=torch.bool if name == "is_top1" else wide) for name in names}
    # no loss scaler has scaled what fp16 would have to hold
    dtype = wide if hidden.dtype == torch.float16 else hidden.dtype
    dhidden = torch.empty(hidden.shape, dtype=dtype, device=hidden.device) if ahead else None
    for part in _parts(len(labels), chunk_rows(weight.shape[0])):  # whatever is trained: products of the same shape
        logits = linear(hidden[part], weight, bias)
        factors = raised(logits) if ahead else None
        log_probs[part], found, dlogits = _statistics(logits, labels[part], scale, softcap, names, ahead, factors)
        for name in names:
            values[name][part] = found[name]
        if dhidden is not None:
            made = (dlogits @ weight).to(dtype)
            dhidden[part] = made if factors is None else made / RAISED
    return log_probs, values, dhidden


def _gradients(ctx, hidden, weight, bias, labels, grad, entropy) -> list[Tensor | None]:
    """The gradients of hidden states, weight and bias, where they are needed."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    given = list(zip((hidden, weight, bias), (hidden.dtype, wide, wide), ctx.needs_input_grad))
    made = [hidden.new_zeros(of.shape if needed else (0,), dtype=dtype) for of, dtype, needed in given]
    factors = torch.zeros_like(entropy) if grad is None else grad
    step = chunk_rows(weight.shape[0])
    if made[1].numel():  # which each chunk reads and writes once more: as many logits as half of its values
        step = max(step, weight.shape[1] // 2)
    for part in _parts(len(labels), step):
        logits = linear(hidden[part], weight, bias)
        rises = None if entropy is None else entropy[part].contiguous()
        *_, dlogits = _statistics(
            logits, labels[part], ctx.scale, ctx.softcap, (), True, factors[part].contiguous(), rises
        )
        add_gradients(dlogits, hidden[part], weight, None, None, part, *made, None, None)
    return [each.to(of.dtype) if needed else None for each, (of, _, needed) in zip(made, given)]


def _statistics(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    softcap: float,
    names: Sequence[str],
    gradient: bool,
    factors: Tensor | None = None,
    rises: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(log-probabilities, statistics, gradient of the sum of factors times log-probabilities and rises times entropies,
    if `gradient`). The logits may be overwritten."""
    if gradient:  # of losses, which are log-probabilities with the other sign
        factors = logits.new_full(logits.shape[:1], -1.0, dtype=torch.float32) if factors is None else -factors
    if not runs_template(logits, labels, scale, softcap):
        losses, made, values = by_torch(logits, labels, scale, softcap, NO_LABEL, 0.0, factors, gradient, names, rises)
        return -losses, values, made
    from tunecompile.templates import cross_entropy

    losses, values = cross_entropy.statistics_and_grad_(
        logits,
        labels,
        names,
        softcap=softcap or None,
        scale=scale,
        grad=gradient,
        factors=factors if gradient else None,
        entropy_factors=rises,
    )
    return -losses, values, logits
