"""Inductor's cache folder among several processes: one compiles and the others reuse its code, or it is read-only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.fx import GraphModule

try:
    import fcntl
except ImportError:  # on Windows no rank waits
    fcntl = None

from tunecompile._torch.distributed import several
from tunecompile._torch.inductor import cache_folder, default_cache_folder, keeps_code
from tunecompile.notes import Note, note

FOLDER = "TORCHINDUCTOR_CACHE_DIR"  #: torch's environment variable for Inductor's cache folder
LONGEST = 120.0  #: seconds that a process waits for another process's code before it compiles by itself
LOOK = 0.05  #: seconds between two attempts at the lock


def link_read_only() -> list[Note]:
    """Use a read-only cache folder by linking its files into torch's default folder.

    Where a folder cannot be written, torch cannot read it either: it locks what it reads by files beside it. So from
    here on the default folder is used.

    Returns:
        Notes for the report.
    """
    given = os.environ.get(FOLDER)
    if given is None or _writable(Path(given)):
        return []
    shared, own = Path(given), default_cache_folder()
    if not _writable(own):
        return [note("no-cache-folder", f"{FOLDER}={shared}", folder=own)]
    for folder, _, files in os.walk(shared):
        here = own / Path(folder).relative_to(shared)
        if here.name == "locks":
            continue
        here.mkdir(exist_ok=True)
        for file in files:
            with contextlib.suppress(FileExistsError):  # of this process or another rank
                os.symlink(Path(folder, file).absolute(), here / file)
    os.environ[FOLDER] = str(own)
    return [note("cache-read-only", f"{FOLDER}={shared}", folder=own)]


def make_private(folder: Path) -> None:
    """Make a folder and what is missing above it, for this user alone: compiled code is read from there, and run."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made where it is missing."""
    with contextlib.suppress(OSError):
        make_private(folder)
        return os.access(folder, os.W_OK | os.X_OK)
    return False


@contextlib.contextmanager
def in_turn(uuid: Callable[[], str | None], gm: GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Of several ranks with the same graph, the first to come here compiles it, and the others wait for its code.

    The rank that compiles waits for no other, except through a GPU whose work may depend on another rank's. So no rank
    waits for ever: after `LONGEST` seconds a process compiles by itself. The lock is the operating system's, and ends
    with its process.

    Args:
        uuid: returns what the code depends on beside the graph, or None where it is not cached.
        gm: the graph.
        inputs: its fake inputs.
    """
    if (
        not several()
        or not keeps_code()
        or (known := uuid()) is None
        or (file := _open(_key(gm, inputs, known))) is None
    ):
        yield
        return
    with file:
        if not _locked(file, shared=False):
            until = time.monotonic() + LONGEST
            while not _locked(file, shared=True) and time.monotonic() < until:
                time.sleep(LOOK)
            _unlock(file)  # all ranks that waited go on together
        yield


def _locked(file: IO, shared: bool) -> bool:
    """Take a file's lock if it is free now; whether that succeeded."""
    assert fcntl is not None  # else `_open` returns no file
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _unlock(file: IO) -> None:
    """Release a file's lock."""
    assert fcntl is not None
    fcntl.flock(file, fcntl.LOCK_UN)


def _open(key: str) -> IO | None:
    """The file of a lock; None where none can be made."""
    if fcntl is None:
        return None
    with contextlib.suppress(OSError):
        folder = cache_folder() / "tunecompile" / "turns"
        make_private(folder)
        return (folder / key).open("w")
    return None


def _key(gm: GraphModule, inputs: Sequence[Any], uuid: str) -> str:
    """The name of the lock of a graph, its inputs and what else its code depends on.

    Code is for one device by its number. So ranks that see all GPUs of a machine share no code, and do not wait for
    each other.
    """
    read = [
        (t.dtype, t.device, *map(str, t.shape), *map(str, t.stride())) if isinstance(t, torch.Tensor) else str(t)
        for t in inputs
    ]
    return hashlib.sha256(f"{uuid}:{read}:{gm.graph}".encode()).hexdigest()[:24]
