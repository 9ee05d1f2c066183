"""Random rows whose lengths are spread as those of real data. (Imports nothing but the standard library.)"""

from __future__ import annotations

import random

SIGMA = 0.6  #: of the logarithm of lengths
SHORTEST = 16  #: tokens of a row, at least


def draw_lengths(count: int, typical: int, longest: int) -> list[int]:
    """So many log-normal lengths with this median."""
    return [max(SHORTEST, min(longest, int(random.lognormvariate(0, SIGMA) * typical))) for _ in range(count)]


def draw_tokens(count: int, vocabulary: int) -> list[int]:
    """A row of so many tokens."""
    return [random.randrange(3, min(vocabulary, 100_000)) for _ in range(count)]
