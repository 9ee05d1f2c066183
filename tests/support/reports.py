"""What the report of an optimized model says, read for tests."""

from __future__ import annotations

from torch import nn

import tunecompile

FLATTENED = "padding is left out of the layers"
TOLD_APART = "packed sequences are told apart without a mask"


def fell_back(model: nn.Module) -> list[str]:
    return [note for note in tunecompile.report(model).notes if "eager" in note or "pieces" in note]


def notes(model: nn.Module) -> str:
    return "\n".join(tunecompile.report(model).notes)


def flattened(model: nn.Module) -> int:
    """How many batches ran without their padding; and nothing fell back."""
    return _batches(model, FLATTENED)


def told_apart(model: nn.Module) -> int:
    """How many packed batches ran without a mask; and nothing fell back."""
    return _batches(model, TOLD_APART)


def _batches(model: nn.Module, note: str) -> int:
    said = notes(model)
    assert "eager" not in said and "pieces" not in said, said
    return int(said.split(note)[1].split("(")[1].split()[0]) if note in said else 0


def head_tally(model: nn.Module):
    """What was found of the head and its loss."""
    return next(m for m in tunecompile.report(model).matches if m.family == "linear_cross_entropy")
