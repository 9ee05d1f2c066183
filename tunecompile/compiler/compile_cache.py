"""Inductor's cache folder, where several processes use it: one of them compiles and the others take what it made, and a folder may be read-only."""

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
except ImportError:  # on Windows nobody waits
    fcntl = None

from tunecompile._torch.distributed import several
from tunecompile._torch.inductor import cache_folder, default_cache_folder, keeps_code

FOLDER = "TORCHINDUCTOR_CACHE_DIR"  #: torch's environment variable
LONGEST = 120.0  #: seconds that a process waits for another's code before it compiles by itself
LOOK = 0.05  #: seconds between two looks


def link_read_only() -> list[str]:
    """Where the folder cannot be written, torch cannot read it either: it locks what it reads by files beside it. Then what it holds is linked into
    torch's default folder, which is used from here on. What there is to say of it."""
    given = os.environ.get(FOLDER)
    if given is None or _writable(Path(given)):
        return []
    shared, own = Path(given), default_cache_folder()
    if not _writable(own):
        return [f"neither {FOLDER}={shared} nor {own} can be written: nothing can be compiled"]
    for folder, _, files in os.walk(shared):
        here = own / Path(folder).relative_to(shared)
        if here.name == "locks":
            continue
        here.mkdir(exist_ok=True)
        for file in files:
            with contextlib.suppress(FileExistsError):  # of this process, or of another rank's
                os.symlink(Path(folder, file).absolute(), here / file)
    os.environ[FOLDER] = str(own)
    return [f"{FOLDER}={shared} cannot be written: what it holds is linked into {own}, where new code is kept"]


def _writable(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    return False


@contextlib.contextmanager
def in_turn(uuid: Callable[[], str | None], gm: GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Of several ranks with the same graph, the first that comes here compiles it, and the others wait until Inductor's cache has it.

    Whoever compiles waits for nobody, but for a GPU whose work may wait for another rank's. So nobody waits for ever: after `LONGEST` a process compiles
    by itself. The lock is the system's, and ends with its process. uuid: gives what the code depends on beside the graph, or None where it is not cached.
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
        if not _locked(file, fcntl.LOCK_EX):
            until = time.monotonic() + LONGEST
            while not _locked(file, fcntl.LOCK_SH) and time.monotonic() < until:
                time.sleep(LOOK)
            fcntl.flock(file, fcntl.LOCK_UN)  # those who waited go on together
        yield


def _locked(file: IO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _open(key: str) -> IO | None:
    """The file of a lock; None where there can be none."""
    if fcntl is None:
        return None
    with contextlib.suppress(OSError):
        folder = cache_folder() / "tunecompile" / "turns"
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / key).open("w")
    return None


def _key(gm: GraphModule, inputs: Sequence[Any], uuid: str) -> str:
    """Code is for one device by its number: ranks that see all GPUs of a machine have nothing to take from each other, and do not wait."""
    read = [
        (t.dtype, t.device, *map(str, t.shape), *map(str, t.stride())) if isinstance(t, torch.Tensor) else str(t)
        for t in inputs
    ]
    return hashlib.sha256(f"{uuid}:{read}:{gm.graph}".encode()).hexdigest()[:24]
