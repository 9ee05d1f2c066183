"""Long tails: once half of the rows have ended, those that are left go on as a smaller batch."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from tunecompile.runtime.rollouts.decode_step import Rows
from tunecompile.runtime.rollouts.prompt import rounded_count

FEWEST = 8  #: rows; a step of fewer is hardly faster
REST = 64  #: tokens that are to come at most: for fewer no step is recorded anew
PAYS = 512  #: tokens, in all calls, after which code for a smaller batch is worth its compilation


class Tail:
    """The rows of a call that go on.

    Args:
        rows: all of them.
        missed: how many tokens a batch of so many rows would have been enough for, in all calls.
    """

    def __init__(self, rows: Rows, missed: Counter[int]):
        self.all, self.rows, self.missed = rows, rows, missed
        self.count = len(rows.tokens)
        self.numbers = torch.arange(self.count, device=rows.tokens.device)  #: of the rows that go on, among all

    def fewer(self, left: int, at: int, looked: int) -> int | None:
        """How many rows the batch should have from now on; None for as many as it has.

        Args:
            left: rows that have not ended.
            at: the column of the next token.
            looked: tokens since somebody asked.
        """
        wanted = max(FEWEST, rounded_count(left))
        if 2 * wanted > len(self.rows.tokens) or self.all.longest - at < REST:
            return None
        self.missed[wanted] += looked
        return wanted if self.missed[wanted] > PAYS else None

    def cut(self, wanted: int) -> Tensor:
        """Leave out rows that have ended, all of them but for copies of one that has not.

        Returns:
            int64 [wanted], the numbers of the rows that go on, among those that did so far.
        """
        going = (~self.rows.ended).nonzero().squeeze(1)
        spare = torch.arange(wanted, device=going.device).clamp(max=len(going) - 1)
        numbers = self.numbers[going]
        self.gather()
        self.count, self.numbers = len(going), numbers[spare]
        self.rows = self.all.part(self.numbers, self.count)
        return going[spare]

    def gather(self) -> None:
        """Put the rows that go on in their places among all."""
        if self.rows is not self.all:
            self.all.put(self.rows, self.numbers[: self.count])
