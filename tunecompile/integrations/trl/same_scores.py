"""Whether two functions give the same scores of tokens, shown by a small problem."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tunecompile.integrations.trl.fused_head import ScoreCall, Scores


def same_scores(ours: Callable[[ScoreCall], Scores], theirs: Callable[[ScoreCall], Scores], like: ScoreCall) -> bool:
    """Whether two functions give the same scores and gradients, on the device and under the options of a call.

    The problem is small, and its numbers are no random ones: a training's random numbers stay as they are.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(like.hidden.device.type, enabled=False):
        given, made = zip(*(_differentiated(function, like) for function in (ours, theirs)))
    if [value is None for value in given[0]] != [value is None for value in given[1]]:
        return False
    pairs = [*zip(*given), *zip(*made)]
    return all(_is_near(a, b) for a, b in pairs if a is not None)


def _differentiated(function: Callable[[ScoreCall], Scores], like: ScoreCall) -> tuple[Scores, tuple]:
    """(the scores of the small problem, gradients of log-probabilities and entropies weighed by row)."""
    device, rows, vocabulary, width = like.hidden.device, 5, 37, 8

    def waves(*shape: int, pace: float) -> Tensor:
        count = torch.Size(shape).numel()
        values = torch.sin(torch.arange(1, count + 1, dtype=torch.float32, device="cpu") * pace).view(shape)
        return values.to(device).requires_grad_()

    hidden, weight = waves(rows, width, pace=0.7), waves(vocabulary, width, pace=1.3)
    bias = None if like.bias is None else waves(vocabulary, pace=2.1)
    labels = (hidden @ weight.t()).argmax(-1)
    labels[::2] = torch.arange(0, vocabulary, 13, device=device)
    found = function(
        ScoreCall(hidden, weight, bias, labels, like.temperature, like.softcap, like.logit_scale, like.outputs)
    )
    factors = torch.arange(1, rows + 1, dtype=torch.float32, device=device)
    total = (found[0] * factors).sum()
    if found[1] is not None:
        total = total + (found[1] * factors.flip(0)).sum()
    trained = [each for each in (hidden, weight, bias) if each is not None]
    return tuple(None if value is None else value.detach() for value in found), torch.autograd.grad(total, trained)


def _is_near(a: Tensor, b: Tensor) -> bool:
    """By more than products in TF32 differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a.double() - b.double()).abs() <= 1e-2 * b.double().abs().max().clamp(min=1e-3)).all())
