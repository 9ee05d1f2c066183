"""Passes of installed packages: the entry-point group `tunecompile.passes`.

    [project.entry-points."tunecompile.passes"]
    squared_relu = "squared_relu:PASSES"

An entry point is a `Pass` or a sequence of them; loading it registers its ops and providers, too. Everything is checked
when a model is optimized, and errors name the package. A package that fails later costs its own passes
(`plugin_sandbox`).
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from itertools import accumulate
from pathlib import Path

from tunecompile.compiler.pass_manager import STAGES, Pass, Stage, validate
from tunecompile.compiler.plugin_sandbox import Package
from tunecompile.errors import InvalidPackage, UnknownEntryPoint, summary
from tunecompile.notes import Note, note

__all__ = ["CHOICE", "GROUP", "compose", "pipeline"]

GROUP = "tunecompile.passes"  #: of entry points
#: environment variable: names of entry points, separated by commas, or "none"; all where it is not set
CHOICE = "TUNECOMPILE_PASSES"


def pipeline(own: Sequence[Pass]) -> tuple[Pass, ...]:
    """All passes for one model: those that come with tunecompile, and those of installed packages.

    Args:
        own: the passes of tunecompile, in order (`tunecompile.passes.PIPELINE`).

    Returns:
        Passes in order, each of a package with that package.

    Raises:
        InvalidPackage: passes of a package cannot be used.
        UnknownEntryPoint: the environment names one that is not installed.
    """
    entries = chosen(os.environ.get(CHOICE))
    brought = []
    for entry in entries:
        try:
            brought.append(load(entry))
        except Exception as error:
            raise _invalid(entry, entries, f"{entry.value} cannot be loaded ({summary(error)})") from error
    everything = [*own, *(p for passes in brought for p in passes)]
    made = compose(validate(own), everything[len(own) :])
    for entry, passes in zip(entries, brought):
        for p in passes:
            if (reason := fault(p, everything, made)) is not None:
                raise _invalid(entry, entries, reason)
    return tuple(made)


def report_lines(passes: Sequence[Pass]) -> list[Note]:
    """Lines for the report: which package brings which passes, and which of these are switched off."""
    names: dict[Package, list[str]] = {}
    for p in passes:
        if p.package is not None:
            names.setdefault(p.package, []).append(p.name)
    return [
        line
        for package, brought in names.items()
        for line in (
            note("package-passes", package.label, ", ".join(brought)),
            *map(package.describe_failure, package.failed),
        )
    ]


def chosen(names: str | None) -> list[EntryPoint]:
    """The installed entry points that are requested, in alphabetical order, so that all ranks compile the same.

    Args:
        names: separated by commas; None for all.

    Returns:
        Entry points.

    Raises:
        UnknownEntryPoint: a name is not installed.
    """
    found = sorted(entry_points(group=GROUP), key=lambda entry: (label(entry), entry.name))
    if names is None:
        return found
    wanted = {name.strip() for name in names.split(",")} - {"", "none"}
    if unknown := wanted - {entry.name for entry in found}:
        raise UnknownEntryPoint(
            unknown=", ".join(sorted(unknown)), known=", ".join(entry.name for entry in found) or "none"
        )
    return [entry for entry in found if entry.name in wanted]


def label(entry: EntryPoint) -> str:
    """Name and version of the package that an entry point belongs to."""
    return "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def load(entry: EntryPoint) -> list[Pass]:
    """Load the passes of an entry point.

    Args:
        entry: its value is a pass or a sequence of passes.

    Returns:
        The passes, each with its package. A package of providers alone gets an empty pass, since compiled code depends
        on it as well.

    Raises:
        TypeError: the value is something else. Importing the module may raise anything.
    """
    loaded = entry.load()
    passes = [loaded] if isinstance(loaded, Pass) else loaded
    if not isinstance(passes, (list, tuple)) or not all(isinstance(p, Pass) for p in passes):
        raise TypeError(f"it is a {type(loaded).__name__}, and neither a Pass nor a list of Passes")
    package = Package(label(entry), digest(entry.module))
    return [
        replace(p, package=package)
        for p in passes or [Pass(f"ops of {entry.name}", "recognize", lambda graph, context: None)]
    ]


def digest(module: str) -> str:
    """A hash of the source of the whole package that a module belongs to."""
    owners = (sys.modules[name] for name in accumulate(module.split("."), "{}.{}".format))  # the outermost first
    owner = next((found for found in owners if getattr(found, "__file__", None)), None)  # a namespace has no file
    if owner is None or owner.__file__ is None:
        return ""
    file = Path(owner.__file__)
    files = sorted(file.parent.rglob("*.py")) if hasattr(owner, "__path__") else [file]
    return hashlib.sha256(
        b"".join(str(path.relative_to(file.parent)).encode() + path.read_bytes() for path in files)
    ).hexdigest()


def compose(own: Sequence[Pass], others: Sequence[Pass]) -> list[Pass]:
    """The pipeline of our own passes and others, each of the others as early in its stage as its requirements allow.

    So a pass that requires nothing comes first in its stage. Recognition goes from wide to narrow. A pattern that
    tunecompile does not know is mostly wider than its own patterns, which would take the anchor away. A narrower
    pattern requires the family that should match first. Tags of a `plan` pass hold unless `remat` overrides them; a
    pass that overrides `remat` requires it. A `lower` pass sees ops, or their providers' graphs if it requires
    `choose_provider`. A pass whose requirements are not met is left out.

    Args:
        own: passes, in their order.
        others: passes of packages. Those that could be at one place keep the order given.

    Returns:
        Passes in order.
    """
    made: list[Pass] = []
    waiting, provided = list(others), set()

    def admit(p: Pass, stage: Stage) -> None:
        made.append(p)
        provided.update(p.provides, {p.name})
        follow(stage)

    def follow(stage: Stage) -> None:
        ready = next((p for p in waiting if p.stage == stage and p.requires <= provided), None)
        if ready is not None:
            waiting.remove(ready)
            admit(ready, stage)

    for stage in STAGES:
        follow(stage)
        for p in own:
            if p.stage == stage:
                admit(p, stage)
    return made


def fault(p: Pass, everything: Sequence[Pass], made: Sequence[Pass]) -> str | None:
    """Why a package's pass cannot be used; None if it can. made: the passes that have a place in the pipeline."""
    if p.stage not in STAGES:
        return f"the stage of {p.name} is {p.stage!r}, which is none of {', '.join(STAGES)}"
    for other in everything:
        if other is not p and other.name == p.name:
            return f"a pass by the name of {p.name} {_whose(other)}"
        if other.name in p.conflicts or p.name in other.conflicts:
            return f"{p.name} conflicts with {other.name}, which {_whose(other)}"
    if not any(other is p for other in made):
        provided = {
            name
            for other in made
            for name in (other.name, *other.provides)
            if STAGES.index(other.stage) <= STAGES.index(p.stage)
        }
        return f"{p.name} requires {', '.join(sorted(p.requires - provided))}, which no earlier pass provides"
    return None


def _whose(p: Pass) -> str:
    """Where a pass comes from, as a predicate."""
    return "comes with tunecompile" if p.package is None else f"is brought by {p.package.label}"


def _invalid(entry: EntryPoint, entries: Sequence[EntryPoint], reason: str) -> InvalidPackage:
    others = ",".join(other.name for other in entries if other is not entry) or "none"
    return InvalidPackage(package=label(entry), reason=reason, others=others)
