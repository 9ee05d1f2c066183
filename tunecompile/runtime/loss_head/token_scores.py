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
from tunecompile.ops.linear_cross_entropy import NO_LABEL, STATISTICS
from tunecompile.ops.linear_cross_entropy_rows import row_gradients, score_rows


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


def is_token_scores(node: torch.autograd.graph.Node) -> bool:
    """Whether a node of an autograd graph is that of `token_scores`."""
    return type(node).__name__ == f"{_TokenScores.__name__}Backward"


class _TokenScores(torch.autograd.Function):
    """Under a frozen head the gradient of a row's hidden state is that of its log-probability times one number, so it
    is computed in the forward pass, where the logits are at hand. Else, and for a gradient of the entropy, which loops
    seldom use, each chunk of logits is made once more."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, labels, scale, softcap, names, ahead):
        ctx.set_materialize_grads(False)
        ctx.given = dict(
            inner=None, outer=None, scale=scale, softcap=softcap, ignore_index=NO_LABEL, label_smoothing=0.0
        )
        with no_autocast(), torch.no_grad():
            losses, dhidden, values = score_rows(
                hidden, weight, bias, labels=labels, ahead=ahead, names=names, **ctx.given
            )
        ctx.save_for_backward(hidden, weight, bias, labels, dhidden if ahead else None)
        ctx.mark_non_differentiable(*(values[name] for name in names if name != "entropy"))
        return -losses, *(values[name] for name in names)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, *rest):
        hidden, weight, bias, labels, dhidden = ctx.saved_tensors
        # of the statistics only the first, the entropy, has a gradient
        entropy = next((each for each in rest if each is not None), None)
        if grad is None and entropy is None:
            return (None,) * 8
        if dhidden is not None and entropy is None:
            return (dhidden * -grad[:, None]).to(hidden.dtype), *(None,) * 7
        factors = torch.zeros_like(entropy) if grad is None else -grad
        train_hidden, *trained = ctx.needs_input_grad[:3]
        with no_autocast():
            how = dict(train_hidden=train_hidden, train_weight=any(trained), **ctx.given)
            made = row_gradients(factors, entropy, hidden, weight, bias=bias, labels=labels, **how)
        needed = [each if wanted else None for each, wanted in zip(made, ctx.needs_input_grad[:3])]
        return *needed, *(None,) * 5
