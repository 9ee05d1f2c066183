"""One token of all rows: the step that is recorded. All that changes from token to token is in fixed memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tunecompile.integrations.generation import fixed_inputs
from tunecompile.runtime.rollouts.choice import Choice
from tunecompile.runtime.unpad.masks.recorder import MaskRecorder


class Rows:
    """The tokens of all rows, and which rows have ended.

    Args:
        prompt: int64 [rows, T].
        longest: tokens that a row may have, prompt included.
        ends: int64 [E], the tokens that end a row; None if none does.
        pad: int64 [], what follows the end of a row.
        count: how many rows the caller has; those behind have ended.
    """

    def __init__(self, prompt: Tensor, longest: int, ends: Tensor | None, pad: Tensor | None, count: int):
        rows, length = prompt.shape
        self.longest, self.ends = longest, None if ends is None else ends.to(prompt.device)
        self.pad = prompt.new_zeros(()) if pad is None else pad.to(prompt.device)
        self.tokens = torch.nn.functional.pad(prompt, (0, longest - length))
        self.at = prompt.new_full((), length)  #: the column of the next token
        self.ended = torch.arange(rows, device=prompt.device) >= count
        self.lengths = prompt.new_full((rows,), longest)  #: of each row, with the token that ended it

    @property
    def last(self) -> Tensor:
        """int64 [rows, 1], the tokens that were appended last."""
        return self.tokens.index_select(1, (self.at - 1).view(1))

    def first(self, columns: int) -> Tensor:
        """int64 [rows, columns], as code of the host takes them: it may view them in another shape."""
        return self.tokens[:, :columns].contiguous()

    def append(self, chosen: Tensor) -> None:
        """Append a token to each row: padding to those that have ended, where tokens end them."""
        if self.ends is not None:
            chosen = torch.where(self.ended, self.pad, chosen)
        self.tokens.index_copy_(1, self.at.view(1), chosen[:, None])
        self.at.add_(1)
        if self.ends is not None:
            self.end(torch.isin(chosen, self.ends))

    def part(self, numbers: Tensor, count: int) -> Rows:
        """Some of these rows. Those behind `count` have ended. numbers: int64 [rows]."""
        made = copy.copy(self)
        made.tokens, made.lengths = self.tokens[numbers], self.lengths[numbers]
        made.ended = torch.arange(len(numbers), device=numbers.device) >= count
        return made

    def put(self, part: Rows, numbers: Tensor) -> None:
        """Put the first rows of a part in the places of these numbers, and padding behind the ends of all others."""
        count = len(numbers)
        behind = torch.arange(self.longest, device=numbers.device) >= self.lengths[:, None]
        self.tokens = torch.where(behind, self.pad, self.tokens)
        self.tokens[numbers], self.lengths[numbers] = part.tokens[:count], part.lengths[:count]
        self.ended[numbers] = part.ended[:count]

    def end(self, rows: Tensor | bool) -> None:
        """Rows end with the token that was appended last. rows: bool [rows], or one value for all of them."""
        rows = torch.as_tensor(rows, device=self.ended.device)
        self.lengths.copy_(torch.where(rows & ~self.ended, self.at, self.lengths))
        self.ended.logical_or_(rows)


class DecodeStep:
    """The forward of the tokens appended last, and the choice of the next ones.

    Args:
        model: transformers' model, below adapters.
        kwargs: of its first call after the prompt, with the cache.
        rows: the tokens.
        choice: of the next ones, if it is recorded with the forward.
        length: of the cache.
        layers: makes a context in which the layers run as those of a step.
    """

    def __init__(
        self, model: Any, kwargs: dict[str, Any], rows: Rows, choice: Choice, length: int, layers: Callable[[], Any]
    ):
        self.model, self.rows, self.choice, self.layers = model, rows, choice, layers
        self.kwargs, self.mask, self.positions = fixed_inputs(kwargs, length)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Return logits and scores, fp32 [rows, V] each; these are the logits where the host computes scores."""
        rows = self.rows
        with MaskRecorder(math.inf):  # numbers that a mask is made of reach the device without a copy
            inputs = self.model.prepare_inputs_for_generation(rows.last, next_sequence_length=1, **self.kwargs)
        with self.layers():
            logits = self.model(**inputs, return_dict=True).logits[:, -1].float()
        scores = logits
        if self.choice.recorded:
            scores = self.choice.scores(rows.tokens, logits, rows.at)
            rows.append(self.choice.pick(scores))
            self.advance()
        return logits, scores

    def advance(self) -> None:
        """What the next step reads beside the tokens."""
        if self.positions is not None:
            self.positions.add_(1)
        if self.mask is not None:
            self.mask.index_fill_(1, (self.rows.at - 1).view(1), 1)
