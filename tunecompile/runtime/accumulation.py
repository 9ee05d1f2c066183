"""What accumulated batches would take at once, by the times that a training's own batches took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST = 8  #: batches that a line through their times is drawn by
PAUSE = 3.0  #: medians, beyond which a time is a pause and no batch's
WORTH = 0.9  #: of a step's time, below which it is worth saying


@dataclass(frozen=True)
class Batch:
    """A batch whose forward begins."""

    when: float  #: seconds
    tokens: int
    begins: bool  #: whether no gradients were there yet: it is the first one of a step


@dataclass(frozen=True)
class Step:
    """A step's batches, and when the next one began."""

    batches: tuple[Batch, ...]
    end: float


@dataclass(frozen=True)
class AtOnce:
    """Several batches as one."""

    count: int  #: of batches that become one
    steps: int  #: that are left to accumulate
    tokens: int  #: of a batch now, the median
    ratio: float  #: of a step's time


def steps_of(batches: Sequence[Batch]) -> list[Step]:
    """The whole steps: what comes before the first beginning and after the last is none."""
    starts = [place for place, batch in enumerate(batches) if batch.begins]
    return [Step(tuple(batches[first:last]), batches[last].when) for first, last in pairwise(starts)]


def at_once(batches: Sequence[Batch], most: int) -> AtOnce | None:
    """What the accumulated batches of a step would take as fewer; None where that is not known, or not worth saying.

    A batch takes some time whatever its tokens are (launches, weights that are dequantised), and some for each token.
    Both follow from batches of different sizes; the last one of a step also waits for the optimizer, so it is not among
    them. Batches that become one take the former once.

    Args:
        batches: in their order.
        most: how many batches fit at once.
    """
    steps = steps_of(batches)
    size = statistics.mode(len(step.batches) for step in steps) if steps else 1
    steps = [step for step in steps if len(step.batches) == size]
    count = next((count for count in range(min(size, most), 1, -1) if size % count == 0), 1)
    alone = _time_of_none([pair for step in steps for pair in pairwise(step.batches)])
    if count == 1 or alone is None:
        return None
    whole = statistics.median(step.end - step.batches[0].when for step in steps)
    ratio = 1 - (size - size // count) * alone / whole
    tokens = statistics.median_high(batch.tokens for step in steps for batch in step.batches)
    return AtOnce(count, size // count, tokens, ratio) if ratio <= WORTH else None


def _time_of_none(pairs: Sequence[tuple[Batch, Batch]]) -> float | None:
    """Seconds of a batch without tokens, by a line through those of batches that another follows."""
    usual = statistics.median([after.when - batch.when for batch, after in pairs]) if pairs else 0.0
    times = [
        (batch.tokens, after.when - batch.when) for batch, after in pairs if after.when - batch.when < PAUSE * usual
    ]
    if len(times) < LEAST or len({tokens for tokens, _ in times}) < 2:
        return None
    slope, alone = statistics.linear_regression(*zip(*times, strict=True))
    return min(alone, *(seconds for _, seconds in times)) if slope >= 0 and alone > 0 else None
