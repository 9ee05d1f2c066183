"""Measured choices on disk: one small JSON file for each, beside Inductor's caches.

A file is named by the hash of its key and holds the key in clear. The first file stays: it appears whole under its name
or not at all, and later writers take its value. So all processes that share the folder, such as the ranks of one
machine, agree on one choice without a message between them. (A broadcast from rank 0 would wait for ever where only
some ranks compile: those with a batch of a new shape, or the stages of a pipeline.) Ranks on machines without a common
folder may choose differently, which changes speed and the order of additions, nothing else.

A folder that cannot be written, or a damaged file, costs a measurement, never the training.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tunecompile._torch.card import emulated
from tunecompile._torch.inductor import cache_folder
from tunecompile.compiler.compile_cache import make_private


def machine(device: torch.device) -> dict[str, Any]:
    """The GPU and versions that a measurement depends on. Part of every key."""
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton,
    } | ({"as": emulated()} if emulated() else {})


def _path(kind: str, key: dict[str, Any]) -> Path:
    """The file of a choice."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "tunecompile" / f"{kind}-{digest[:24]}.json"


Sound = Callable[[Any], bool]  #: whether a stored value is what the reader expects


def read(kind: str, key: dict[str, Any], sound: Sound) -> Any | None:
    """The value stored under a key.

    Args:
        kind: of the choice, such as "attention".
        key: JSON values only.
        sound: whether a stored value is as the reader expects.

    Returns:
        The value; None where there is none, or a damaged one.
    """
    try:
        stored = json.loads(_path(kind, key).read_text())
        return stored["value"] if stored["key"] == key and sound(stored["value"]) else None
    except (OSError, ValueError, KeyError, TypeError):  # absent, unreadable, damaged
        return None


def keep(kind: str, key: dict[str, Any], value: Any, sound: Sound) -> Any:
    """Store a measurement and return the one that holds: the first that was stored under this key."""
    with contextlib.suppress(OSError):
        path = _path(kind, key)
        make_private(path.parent)
        handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"key": key, "value": value}, file, indent=1)
            _place(name, path, damaged=path.exists() and read(kind, key, sound) is None)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    stored = read(kind, key, sound)
    return value if stored is None else stored


def _place(name: str, path: Path, damaged: bool) -> None:
    """Move a file to its name in one step; of several writers the first wins."""
    if not damaged:
        try:
            os.link(name, path)
            return
        except FileExistsError:
            return
        except OSError:  # no hard links on this file system: there the last wins
            pass
    os.replace(name, path)
