"""Passes of installed packages: the entry-point group `tunecompile.passes`.

    [project.entry-points."tunecompile.passes"]
    squared_relu = "squared_relu:PASSES"

An entry point is a `Pass` or a sequence of them; loading it registers its ops and providers, too. All is checked when a model is
optimized, and what is wrong is told by the package's name. A package that fails later costs its own passes (`guard`).
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from tunecompile.compiler.pass_manager import STAGES, Pass, Stage, validate
from tunecompile.compiler.plugin_sandbox import Package
from tunecompile.errors import InvalidPackage, UnknownEntryPoint, summary

__all__ = ["CHOICE", "GROUP", "compose", "pipeline"]

GROUP = "tunecompile.passes"  #: of entry points
CHOICE = "TUNECOMPILE_PASSES"  #: environment variable: names of entry points, separated by commas, or "none"; all where it is not set


def pipeline(own: Sequence[Pass]) -> tuple[Pass, ...]:
    """All passes for one model: those that come with tunecompile, and those of installed packages.

    Args:
        own: the former, in order (`tunecompile.passes.PIPELINE`).

    Returns:
        Passes in order, each of a package with that package.

    Raises:
        InvalidPackage: passes of a package cannot be used.
        UnknownEntryPoint: the environment asks for one that is not installed.
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


def said(passes: Sequence[Pass]) -> list[str]:
    """For the report: which package brings which passes, and which of them are switched off."""
    names: dict[Package, list[str]] = {}
    for p in passes:
        if p.package is not None:
            names.setdefault(p.package, []).append(p.name)
    return [
        line
        for package, brought in names.items()
        for line in (f"passes of {package.label}: {', '.join(brought)}", *map(package.said, package.failed))
    ]


def chosen(names: str | None) -> list[EntryPoint]:
    """Those of the installed entry points that are asked for: None for all. In alphabetical order, so that all ranks compile the same."""
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
    return f"{entry.dist.name} {entry.dist.version}"


def load(entry: EntryPoint) -> list[Pass]:
    """The passes, each with its package. A package of providers alone brings none, but compiled code depends on it as well."""
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
    """Of the source of the whole package a module belongs to."""
    parts = module.split(".")
    owners = (sys.modules[".".join(parts[:i])] for i in range(1, len(parts) + 1))
    owner = next((found for found in owners if getattr(found, "__file__", None)), None)  # a namespace has no file
    if owner is None:
        return ""
    file = Path(owner.__file__)
    files = sorted(file.parent.rglob("*.py")) if hasattr(owner, "__path__") else [file]
    return hashlib.sha256(
        b"".join(str(path.relative_to(file.parent)).encode() + path.read_bytes() for path in files)
    ).hexdigest()


def compose(own: Sequence[Pass], others: Sequence[Pass]) -> list[Pass]:
    """The pipeline of our own passes and those of other packages: each of theirs stands as early in its stage as what it requires allows.

    A pass that requires nothing thus comes first in its stage. Recognition goes from wide to narrow, and a pattern that tunecompile does not
    know is mostly wider than those it knows, which would eat its anchor; one that is narrower names the family it leaves the first choice
    to. Tags of a `plan` pass are those of the partitioner unless `remat` knows better; one that knows better than `remat` requires it. A
    `lower` pass sees ops, or what became of them if it requires `choose_provider`. What a pass requires in vain keeps it out.

    Args:
        own: passes, in their order.
        others: passes of packages, in any order; those that could stand at one place keep this.

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
    """Why a package's pass cannot be used, if it cannot. made: those that found their place."""
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
    return "comes with tunecompile" if p.package is None else f"is brought by {p.package.label}"


def _invalid(entry: EntryPoint, entries: Sequence[EntryPoint], reason: str) -> InvalidPackage:
    others = ",".join(other.name for other in entries if other is not entry) or "none"
    return InvalidPackage(package=label(entry), reason=reason, others=others)
