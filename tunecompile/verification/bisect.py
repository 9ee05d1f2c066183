"""Which rewrite gives wrong gradients: bisection over all that the passes may rewrite, in the order in which they do.

A unit of it is one rewrite, or a pass that is more than a list of rewrites, or any pass of another package. Later units build on earlier
ones, so prefixes are tried, and what is switched off takes along what requires it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tunecompile.compiler.pass_manager import Pass, recognize, validate
from tunecompile.ir.rewrite import Rewrite


@dataclass(frozen=True)
class Suspect:
    """One rewrite of a pass, or all of the pass."""

    family: str
    rewrite: Rewrite | None = None

    @property
    def name(self) -> str:
        return self.family if self.rewrite is None else f"{self.family}: {self.rewrite.name}"


def units(passes: Sequence[Pass]) -> list[Suspect]:
    """All that may be switched off, in order."""
    found = []
    for p in passes:
        if _optional(p):
            found += [Suspect(p.name, rewrite) for rewrite in p.rewrites] or [Suspect(p.name)]
    return found


def only(passes: Sequence[Pass], chosen: Sequence[Suspect]) -> tuple[Pass, ...]:
    """The pipeline with these of its units, and without passes whose requirements are gone."""
    made: list[Pass] = []
    provided: set[str] = set()
    for p in passes:
        kept = [unit for unit in chosen if unit.family == p.name]
        if (_optional(p) and not kept) or not p.requires <= provided:
            continue
        partial = p.rewrites and len(kept) < len(p.rewrites)
        made.append(_narrowed(p, [unit.rewrite for unit in kept]) if partial else p)
        provided |= p.provides | {p.name}
    return validate(made)


def _optional(p: Pass) -> bool:
    return p.stage == "recognize" or p.package is not None


def _narrowed(p: Pass, rewrites: Sequence[Rewrite]) -> Pass:
    """The same pass with some of its rewrites."""
    return replace(p, run=recognize(p.name, rewrites, p.anchors).run, rewrites=tuple(rewrites))


def without(passes: Sequence[Pass], unit: Suspect) -> tuple[Pass, ...]:
    return only(passes, [other for other in units(passes) if other != unit])


def find(passes: Sequence[Pass], wrong: Callable[[tuple[Pass, ...]], bool]) -> Suspect | None:
    """The first unit with which a step is wrong; None where it is wrong without any. wrong: of a pipeline; of all of `passes`, it holds."""
    ordered = units(passes)
    if not ordered or wrong(only(passes, [])):
        return None
    right, bad = 0, len(ordered)
    while bad - right > 1:
        middle = (right + bad) // 2
        right, bad = (right, middle) if wrong(only(passes, ordered[:middle])) else (middle, bad)
    return ordered[bad - 1]
