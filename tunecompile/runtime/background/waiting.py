"""What a model's regions share whose code comes from the background."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tunecompile.compiler.background.process import BackgroundCompiler
from tunecompile.notes import Note, note

__all__ = ["Background", "Change"]

ROUNDS = 3  #: how often one kind of call of a region may change over. Then its code is made where it is needed


@dataclass(frozen=True)
class Change:
    """A region changed over to its code."""

    region: str
    step: int  #: the first with this code, from 1
    seconds: float  #: since the code was ordered
    error: str = ""  #: why it was not made in the background

    @property
    def note(self) -> Note:
        """For the report."""
        if self.error:
            return note("not-from-background", self.region, self.error, step=self.step)
        return note("changed-over", self.region, step=self.step, seconds=f"{self.seconds:.1f}")


@dataclass
class Background:
    """The processes that generate code, and which regions have changed over to it."""

    compiler: BackgroundCompiler = field(default_factory=BackgroundCompiler)
    refused: Note | None = None  #: why code is generated before it runs, as without a background
    step: int = 0  #: the number of the training step under way
    changes: list[Change] = field(default_factory=list)
    rounds: Counter[tuple[str, Hashable]] = field(default_factory=Counter)  #: changes of a region's kind of call

    def takes(self, region: str, key: Hashable) -> bool:
        """Whether a kind of call of a region may run op by op until there is code for it."""
        return self.refused is None and self.rounds[(region, key)] < ROUNDS

    def changes_of(self, region: str) -> list[dict[str, Any]]:
        """For the report: step, seconds and error of each change of a region."""
        return [
            {"step": each.step, "seconds": round(each.seconds, 1), "error": each.error}
            for each in self.changes
            if each.region == region
        ]

    def note_change(self, change: Change, key: Hashable) -> None:
        """A kind of call changed over."""
        self.changes.append(change)
        self.rounds[(change.region, key)] += 1
