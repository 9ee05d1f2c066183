"""Notes of a report by their codes (tunecompile.notes): tests look at these, and at names and figures, not at wording."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

import tunecompile
from tunecompile.notes import KINDS, Note

EAGER = ("ran-eagerly", "not-compiled")  #: a layer ran as without us
BROKEN = ("graph-break", "parametrizing-modules")  #: a layer is several graphs
#: a pass or a kernel raised, or steps were not ours
FAILED = ("compiled-without-rewrites", "provider-failed", "compiled-from-outside", "transformed", "replicas")


def codes(told: Any) -> list[str]:
    """Codes of notes and of the reasons inside them, in order. told: a model, its report, or anything with notes, or a list of them."""
    return [each.code for each in _chains(told)]


def find(told: Any, *wanted: str, reason: str = "", **values: Any) -> list[Note]:
    """Notes, and reasons inside notes, of some codes.

    Args:
        told: as for `codes`.
        wanted: codes.
        reason: a code among the reasons inside.
        values: `subject`, `detail` and further fields: text that they contain, or a value that they equal.
    """
    unknown = {*wanted, *([reason] if reason else [])} - KINDS.keys()
    assert not unknown, f"the table of notes has no {', '.join(unknown)}"
    return [
        each
        for each in _chains(told)
        if each.code in wanted
        and (not reason or reason in [inner.code for inner in each.chain()][1:])
        and all(_agrees(_value(each, name), value) for name, value in values.items())
    ]


def has(told: Any, code: str, reason: str = "", **values: Any) -> bool:
    """Whether there is such a note."""
    return bool(find(told, code, reason=reason, **values))


def fell_back(told: Any) -> list[Note]:
    """Notes about layers that ran eagerly, or in several graphs."""
    return find(told, *EAGER, *BROKEN)


def logged(records: Any) -> list[str]:
    """Codes of the notes that were logged. records: pytest's `caplog.records`."""
    return [each.code for record in records for each in record.args or () if isinstance(each, Note)]


def _chains(told: Any) -> Iterator[Note]:
    for each in _listed(told):
        if isinstance(each, Note):
            yield from each.chain()


def _listed(told: Any) -> list[Any]:
    if isinstance(told, str):
        return [told]
    if isinstance(told, (list, tuple)):
        return list(told)
    return tunecompile.report(told).notes if isinstance(told, nn.Module) else told.notes


def _value(found: Note, name: str) -> Any:
    return getattr(found, name) if name in ("subject", "detail") else found.fields[name]


def _agrees(found: Any, value: Any) -> bool:
    return value in found if isinstance(found, str) and isinstance(value, str) else found == value
