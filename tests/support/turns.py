"""Slow cases have a turn: a few at each commit, so that none of them fails for weeks unseen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

SHARE = 60  #: of so many functions with slow cases, one has its turn at a commit


def turn(cases: Iterable[str], commit: str, share: int = SHARE) -> set[str]:
    """Of the functions of these cases about one in `share`, and one case of each: the same wherever the commit is tested."""
    functions: dict[str, list[str]] = {}
    for case in cases:
        functions.setdefault(case.partition("[")[0], []).append(case)
    drawn = {function: number(f"{commit} {function}") for function in functions}
    return {
        cases[drawn[function] // share % len(cases)]
        for function, cases in functions.items()
        if drawn[function] % share == 0
    }


def number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
