"""The base class of all errors, one-line summaries, and the error of a missing optional package."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

_RAISED = re.compile(r"\w*(Error|Exception): ")  #: how the last line of a traceback begins


def summary(error: BaseException) -> str:
    """Describe an error in one line, for notes and reports.

    Args:
        error: any exception.

    Returns:
        The class name, and at most 300 characters of the first line of the message; with that of the error it quotes,
        where the line ends with a colon. (Errors of Inductor's workers quote theirs, with its traceback.)
    """
    lines = str(error).strip().splitlines() or [""]
    quoted = [line for line in lines[1:] if _RAISED.match(line)] if lines[0].endswith(":") else []
    return f"{type(error).__name__}: {' '.join([lines[0], *quoted[-1:]])[:300]}"


class TunecompileError(Exception):
    """Base class of all errors below.

    Args:
        fields: values for the placeholders of a subclass's `template`, by name. They stay readable as `error.fields`.
    """

    template = "{message}"

    def __init__(self, **fields: Any):
        self.fields = fields
        super().__init__(self.template.format(**fields))


class MissingExtra(TunecompileError):
    """An optional package is required and not installed. The message names the extra to install."""

    template = "{what} needs {package}, which is not installed. Install it: pip install 'tunecompile[{extra}]'"


def need(what: str, extra: str, *packages: str) -> None:
    """Require that packages are installed.

    Args:
        what: needs them.
        extra: of this package, which installs them.
        packages: as they are imported.

    Raises:
        MissingExtra: for the first one that is not there.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(what=what, package=package, extra=extra)


class MissingHost(TunecompileError, ImportError):
    """A door of `tunecompile.trainers` was imported, and its host is not installed."""

    template = "{door} needs {package}, which is not installed. Install it: pip install {package}"
