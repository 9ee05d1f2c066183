"""Find the rewrite that gives wrong gradients, by bisection over all rewrites in the order in which they run.

A suspect is one rewrite, a pass that is more than a list of rewrites, or any pass of another package. Later suspects
build on earlier ones, so prefixes are tried, and a pass that is switched off takes along the passes that require it.
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
        """As reports name it."""
        return self.family if self.rewrite is None else f"{self.family}: {self.rewrite.name}"


def units(passes: Sequence[Pass]) -> list[Suspect]:
    """Everything that may be switched off, in order."""
    found = []
    for p in passes:
        if _optional(p):
            found += [Suspect(p.name, rewrite) for rewrite in p.rewrites] or [Suspect(p.name)]
    return found


def only(passes: Sequence[Pass], chosen: Sequence[Suspect]) -> tuple[Pass, ...]:
    """The pipeline with some of its suspects, and without passes whose requirements are gone."""
    made: list[Pass] = []
    provided: set[str] = set()
    for p in passes:
        kept = [unit for unit in chosen if unit.family == p.name]
        if (_optional(p) and not kept) or not p.requires <= provided:
            continue
        partial = p.rewrites and len(kept) < len(p.rewrites)
        made.append(_narrowed(p, [unit.rewrite for unit in kept if unit.rewrite is not None]) if partial else p)
        provided |= p.provides | {p.name}
    return validate(made)


def _optional(p: Pass) -> bool:
    """Whether a step is right without the pass, too."""
    return p.stage == "recognize" or p.package is not None


def _narrowed(p: Pass, rewrites: Sequence[Rewrite]) -> Pass:
    """The same pass with some of its rewrites."""
    assert p.anchors is not None  # a pass of rewrites has them
    return replace(p, run=recognize(p.name, rewrites, p.anchors).run, rewrites=tuple(rewrites))


def without(passes: Sequence[Pass], unit: Suspect) -> tuple[Pass, ...]:
    """The pipeline without one suspect."""
    return only(passes, [other for other in units(passes) if other != unit])


def find(passes: Sequence[Pass], wrong: Callable[[tuple[Pass, ...]], bool]) -> Suspect | None:
    """Find the first suspect with which a step is wrong.

    Args:
        passes: a pipeline with which a step is wrong.
        wrong: whether a step is wrong with another pipeline.

    Returns:
        The suspect; None where a step is wrong without any.
    """
    ordered = units(passes)
    if not ordered or wrong(only(passes, [])):
        return None
    right, bad = 0, len(ordered)
    while bad - right > 1:
        middle = (right + bad) // 2
        right, bad = (right, middle) if wrong(only(passes, ordered[:middle])) else (middle, bad)
    return ordered[bad - 1]
