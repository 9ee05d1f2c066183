"""What a training's figures say about its health: no device, no model, figures in and notes out."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from tunecompile.notes import Note, note

WINDOW = 32  #: steps that are what is usual
WARM = 16  #: steps before which nothing is usual
AGAIN = 100  #: steps until the same note is written again
LARGE = 1e4  #: a norm of gradients
WAITING = 0.25  #: of a step's time
NEAR = 0.97  #: of a budget


@dataclass
class Judge:
    """The figures of the last steps, and when each note was written."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    written: dict[str, int] = field(default_factory=dict)

    def new(self, step: int, notes: list[Note]) -> list[Note]:
        """Those that were not written in the last steps."""
        kept = [each for each in notes if step - self.written.get(each.code, -AGAIN) >= AGAIN]
        self.written.update({each.code: step for each in kept})
        return kept

    def finite(self, step: int, value: float) -> list[Note]:
        """A loss that is not."""
        return [] if math.isfinite(value) else [note("loss-not-finite", step=step, value=value)]

    def loss(self, step: int, value: float) -> list[Note]:
        """Not finite, a spike, or an oscillation."""
        if found := self.finite(step, value):
            return found
        if usual := _far_above(self.losses, value, spreads=6, least=0.25):
            found.append(note("loss-spike", step=step, value=_short(value), usual=_short(usual)))
        self.losses.append(value)
        recent = list(self.losses)[-WARM:]
        middle = statistics.fmean(recent)
        if len(recent) == WARM and _alternates(recent) and max(recent) - min(recent) > 0.2 * abs(middle):
            by = _short(statistics.median(abs(b - a) for a, b in itertools.pairwise(recent)))
            found.append(note("loss-oscillates", step=step, value=by, usual=_short(middle)))
        return found

    def norm(self, step: int, value: float) -> list[Note]:
        """A large norm of the gradients, or a jump over its running spread. Values that are not finite say nothing."""
        if not math.isfinite(value):
            return []
        usual = _far_above(self.norms, value, spreads=8, least=2.0)
        self.norms.append(value)
        if value > LARGE:
            return [note("gradient-norm-large", step=step, value=_short(value))]
        if usual:
            return [note("gradient-norm-jump", step=step, value=_short(value), usual=_short(usual))]
        return []

    def wait(self, step: int, share: float) -> list[Note]:
        """The share of a step's time in which the device waited for the next batch."""
        self.waits.append(share)
        usual = statistics.median(self.waits)
        if len(self.waits) < WARM or usual < WAITING:
            return []
        return [note("loader-slow", step=step, value=f"{usual:.0%}")]

    def peak(self, step: int, used: float) -> list[Note]:
        """The measured peak as a share of the budget."""
        return [note("memory-near-budget", step=step, value=f"{used:.0%}")] if used > NEAR else []


def _far_above(before: deque[float], value: float, spreads: float, least: float) -> float | None:
    """The usual value, where this one is above it by so many spreads, and by that share of it at least.

    The usual value is the median, and the spread is the mean distance from it.
    """
    if len(before) < WARM:
        return None
    usual = statistics.median(before)
    spread = statistics.fmean(abs(each - usual) for each in before)
    return usual if value - usual > max(spreads * spread, least * abs(usual)) else None


def _alternates(values: list[float]) -> bool:
    """Whether nearly every step goes the other way than the one before."""
    rises = [b > a for a, b in itertools.pairwise(values)]
    return sum(a != b for a, b in itertools.pairwise(rises)) >= len(rises) - 2


def _short(value: float) -> str:
    return f"{value:.3g}"
