"""The choice of the next token of each row, from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tunecompile.integrations.generation import recordable, shortest


class Choice:
    """Scores of the caller's processors, in their order, and a token of each row by them.

    A choice is recorded where each processor reads scores alone, or a length, which is then a tensor. Others are called
    by the host, with the tokens so far.

    Args:
        processors: transformers' `LogitsProcessorList`.
        sample: whether tokens are drawn; else the first best is taken.
    """

    def __init__(self, processors: Sequence[Any], sample: bool):
        self.processors, self.sample = processors, sample
        self.among: tuple[int, Tensor] | None = None  #: of how many rows these are which: all draw, so that each stays
        self.invalid: Tensor | None = None  #: bool [], whether a row had no distribution to draw from
        self.recorded = all(recordable(each) or shortest(each) is not None for each in processors)

    def scores(self, tokens: Tensor, logits: Tensor, at: Tensor) -> Tensor:
        """Return what the processors make of logits.

        Args:
            tokens: int64 [rows, T], of all rows so far. Where the choice is recorded nobody reads them.
            logits: fp32 [rows, V].
            at: int64 [], T.

        Returns:
            fp32 [rows, V].
        """
        scores = logits
        for processor in self.processors:
            bound = shortest(processor)
            if bound is None:
                scores = processor(tokens, scores)
            else:
                ends = torch.zeros_like(scores[0], dtype=torch.bool).index_fill_(0, bound[1].to(scores.device), True)
                scores = scores.masked_fill(ends & (at < bound[0]), -torch.inf)
        return scores

    def pick(self, scores: Tensor) -> Tensor:
        """Return the token of each row, int64 [rows].

        A drawn one is the first of a race: each token arrives after an exponential time, at the rate of its
        probability. `torch.multinomial` does the same, and asks the host whether the probabilities are valid. Times are
        compared by their logarithms, which need no softmax.
        """
        if not self.sample:
            return scores.argmax(-1)
        if self.among is None:
            times = torch.empty_like(scores).exponential_()
        else:
            count, rows = self.among
            times = scores.new_empty(count, scores.shape[1]).exponential_()[rows]
        drawn = (scores - times.log_()).argmax(-1)
        if self.invalid is None:
            self.invalid = torch.zeros((), dtype=torch.bool, device=scores.device)
        # Of a row with a NaN or an infinity that is drawn, and of one that excludes all tokens
        self.invalid.logical_or_(~scores.gather(-1, drawn[:, None]).isfinite().all())
        return drawn

    def check(self) -> None:
        """Look whether all tokens were drawn from distributions, as `torch.multinomial` does.

        Raises:
            RuntimeError: in its words.
        """
        if self.invalid is not None and bool(self.invalid):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
