"""The row of the table of notes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NoteKind:
    """What the notes of one code have in common."""

    words: str  #: a template, filled by `subject`, `detail` and further fields
    mend: str = ""  #: what the user can do about it; empty where there is nothing to do
