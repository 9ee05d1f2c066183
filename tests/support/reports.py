"""What the report of an optimized model says, read for tests."""

from __future__ import annotations

from torch import nn

import tunecompile
from tests.support.notes import fell_back, find


def flattened(model: nn.Module) -> int:
    """How many batches ran without their padding; and nothing fell back."""
    return _batches(model, "padding-removed")


def told_apart(model: nn.Module) -> int:
    """How many packed batches ran without a mask; and nothing fell back."""
    return _batches(model, "packed-without-mask")


def as_documents(model: nn.Module) -> int:
    """How many batches without padding ran as documents; and nothing fell back."""
    assert not fell_back(model), tunecompile.report(model)
    return sum(each.whole for each in model._tunecompile.paddings)


def shared(model: nn.Module) -> tuple[int, int, int]:
    """(batches, tokens that were computed, tokens of rows)."""
    told = find(model, "prefixes-shared")
    return tuple(told[0].fields[name] for name in ("count", "tokens", "rows")) if told else (0, 0, 0)


def _batches(model: nn.Module, code: str) -> int:
    assert not fell_back(model), tunecompile.report(model)
    return next((note.fields["count"] for note in find(model, code)), 0)


def head_tally(model: nn.Module):
    """What was found of the head and its loss."""
    return next(m for m in tunecompile.report(model).matches if m.family == "linear_cross_entropy")
