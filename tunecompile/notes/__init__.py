"""Notes of the report: a code for programs and tests, words for readers, and what the user can do about each.

The table has two parts. `NOTES` are lines of the report. `REASONS` say why inside such a line: each is the `detail`
of another note. The files of this package hold the rows by subject.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tunecompile.notes import compiling, health, memory, padding, providers, running, verifying
from tunecompile.notes.kind import NoteKind


def _joined(tables: list[dict[str, NoteKind]]) -> dict[str, NoteKind]:
    """One table of several.

    Raises:
        ValueError: a code is in two of them.
    """
    made: dict[str, NoteKind] = {}
    for table in tables:
        if twice := made.keys() & table.keys():
            raise ValueError(f"codes of notes are there twice: {', '.join(sorted(twice))}")
        made |= table
    return made


NOTES = _joined([compiling.NOTES, running.NOTES, padding.NOTES, memory.NOTES, verifying.NOTES, health.NOTES])
REASONS = _joined(
    [compiling.REASONS, providers.REASONS, running.REASONS, padding.REASONS, memory.REASONS, verifying.REASONS]
)
KINDS = _joined([NOTES, REASONS])  #: code -> words, and what the user can do


class Note(str):
    """A line of the report: its words, and what it is about. Printed, compared and stored, it is a plain string."""

    code: str  #: a key of `KINDS`
    subject: str  #: what the note is about: a region, a module, a package
    detail: str  #: the reason, often a `Note` as well
    fields: Mapping[str, object]  #: further values in the words, by name

    def __new__(
        cls, words: str, code: str = "", subject: str = "", detail: str = "", fields: Mapping[str, object] | None = None
    ) -> Note:
        """Keep the parts beside the words."""
        made = super().__new__(cls, words)
        made.code, made.subject, made.detail, made.fields = code, subject, detail, fields or {}
        return made

    def chain(self) -> Iterator[Note]:
        """This note, its reason, the reason's reason, and so on, as far as these are notes."""
        at: str = self
        while isinstance(at, Note):
            yield at
            at = at.detail


def note(code: str, subject: str = "", detail: str = "", **fields: object) -> Note:
    """A note in the table's words.

    Args:
        code: of the table.
        subject: what it is about.
        detail: the reason, or another value that the words have: a string, or a `Note`.
        fields: all other values that the words have, by name.

    Raises:
        KeyError: the table has no such code, or the words have a field that is not given.
    """
    words = KINDS[code].words.format(subject=subject, detail=detail, **fields)
    plain = {name: value if isinstance(value, (str, int, float)) else str(value) for name, value in fields.items()}
    return Note(words, code, subject, detail, plain)
