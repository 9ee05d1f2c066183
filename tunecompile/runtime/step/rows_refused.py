"""The error by which a layer's call ends that cannot run on a row of documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tunecompile.notes import Note


class RowsRefused(Exception):
    """A layer cannot run on a row of documents: its batch comes as it is, if its owner's call has to begin anew.

    Args:
        reason: why.
    """

    def __init__(self, reason: Note):
        super().__init__(reason)
        self.reason = reason


def refusing(reason: Note) -> Callable[..., NoReturn]:
    """What takes the place of a compiled graph that may not run on rows: nothing of the layer has run by then.

    (An error while Dynamo compiles would be a failure of the compiler to it.)
    """

    def refuse(*_: Any) -> NoReturn:
        raise RowsRefused(reason)

    return refuse
