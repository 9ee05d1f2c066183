"""A folder of small files in which a monitor and training processes of one user exchange figures. Only that user can
enter it.

A monitor touches the file `asked` there, repeatedly. A training process looks at that file's time, at most once a
second, at the beginning of a step; if it is recent, the process writes its figures beside it. Without a monitor nothing
is ever written.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tunecompile.errors import UnsafeFolder

ASKED = "asked"
PATIENCE = 15.0  #: seconds for which a monitor's asking holds


@dataclass(frozen=True)
class Status:
    """One optimized model in one process, as its last step began. Bytes, seconds since the epoch, milliseconds; None
    where unknown.
    """

    pid: int
    updated: float
    model: str
    device: str
    gpu: str | None  #: UUID as NVML says it
    rank: int | None
    steps: int  #: training forwards of the model
    tokens_per_s: float | None
    step_ms: float | None
    memory: str | None  #: as it was given to `optimize`
    budget: int | None
    predicted_peak: int | None
    measured_peak: int | None
    allocated: int | None
    findings: list[str]  #: the last lines of `tunecompile.watch`
    found: dict[str, int]  #: how many there were, by their codes


def folder() -> Path:
    """The folder of this user's files. It may not exist."""
    return Path(tempfile.gettempdir()) / f"tunecompile-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def safe(path: Path) -> bool:
    """Whether it is a folder, no link, that only this user can enter: in a shared temporary folder any user may have
    made it.
    """
    found = os.lstat(path)
    mine = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    return stat.S_ISDIR(found.st_mode) and mine


def ask() -> None:
    """Have all training processes of this user write their figures at their next step, for the next seconds.

    Raises:
        UnsafeFolder: the folder belongs to another user, is open to others, or is a link.
    """
    path = folder()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not safe(path):
        raise UnsafeFolder(path=path)
    (path / ASKED).touch()


def requested() -> bool:
    """Whether a monitor asked within the last `PATIENCE` seconds."""
    try:
        return abs(time.time() - os.stat(folder() / ASKED).st_mtime) < PATIENCE and safe(folder())
    except OSError:
        return False


def write(status: Status, name: str) -> Path:
    """Write a status under this name, atomically."""
    path = folder() / name
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(status)))
    os.replace(draft, path)
    return path


def read_all() -> list[Status]:
    """The status of all living processes, by number. Files of dead processes and unreadable ones are removed.

    Raises:
        UnsafeFolder: as `ask`.
    """
    if not folder().exists():
        return []
    if not safe(folder()):
        raise UnsafeFolder(path=folder())
    found = []
    for path in folder().glob("*.json"):
        status = _read(path)
        if status is not None and lives(status):
            found.append(status)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda status: (status.pid, status.model))


def _read(path: Path) -> Status | None:
    try:
        return Status(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def lives(status: Status) -> bool:
    """Whether its process runs. Another one, which began later, may have its number."""
    import psutil  # of the extra `cli`

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(status.pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= status.updated
    return False
