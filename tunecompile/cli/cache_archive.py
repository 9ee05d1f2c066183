"""Compiled code and measured choices in one file, for other machines of the same kind: `tunecompile cache`.

torch's own (`torch.compiler.save_cache_artifacts`) is made inside a process, of what that compiled or read from a
cache. This file is made from outside, of all that runs left in the folders, with the measured choices beside it.

torch unpickles and runs what lies in its cache folders, so a file is taken only with the SHA-256 that whoever saved it
tells. What it was made by (versions, the source of this package, GPU) has to be what is here. Nothing of it is
unpickled or run while it is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunecompile._torch.inductor import cache_folder
from tunecompile.cli.toolchain import triton_cache
from tunecompile.compiler.compile_cache import make_private
from tunecompile.compiler.partitioner import source_hash
from tunecompile.errors import CacheDiffers, NotACache, NothingToSave, WrongCache

MANIFEST = "manifest.json"
LEFT_OUT = ("locks", "turns")  #: folders of a process's moment


@dataclass(frozen=True)
class Archive:
    """What was saved or loaded."""

    digest: str  #: SHA-256 of the file
    files: int
    size: int  #: bytes of these files
    kept: int = 0  #: files of these names that were there


def roots() -> dict[str, Path]:
    """The folders of caches, by their names in a file."""
    inductor, triton = cache_folder(), triton_cache()
    found = {"inductor": inductor}
    if inductor not in (triton, *triton.parents):
        found["triton"] = triton
    return found


def describe(native: bool) -> dict[str, Any]:
    """What compiled code depends on.

    Args:
        native: whether some of it is for this machine's CPU.
    """
    gpus = range(torch.cuda.device_count())
    return {
        "tunecompile": source_hash()[:16],
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None,
        "cuda": torch.version.cuda or torch.version.hip,
        "python": f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}",
        "system": f"{sys.platform}-{platform.machine()}",
        "gpu": sorted({f"{torch.cuda.get_device_name(i)}, {torch.cuda.get_device_capability(i)}" for i in gpus}),
        "cpu": _cpu() if native else None,
    }


def save(path: Path) -> Archive:
    """Write everything in the cache folders to one file.

    Raises:
        NothingToSave: there is nothing.
    """
    found = {f"{root}/{name}": file for root, folder in roots().items() for name, file in sorted(_files(folder))}
    if not found:
        raise NothingToSave(folders=", ".join(map(str, roots().values())))
    native = any(name.endswith(".so") and name.startswith("inductor/") and "/triton/" not in name for name in found)
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for name, file in found.items():
            with contextlib.suppress(FileNotFoundError):  # another process writes there
                archive.write(file, name)
        files = archive.infolist()
        made = len(files), sum(each.file_size for each in files)
        archive.writestr(MANIFEST, json.dumps({"made_by": describe(native)}))
    return Archive(_digest(path.read_bytes()), *made)


def load(path: Path, digest: str) -> Archive:
    """Put the files of an archive into the cache folders. Files that are there stay.

    Args:
        path: of the archive.
        digest: its SHA-256, as `save` told.

    Raises:
        WrongCache: it has another one.
        NotACache: it is no archive of `save`.
        CacheDiffers: its code was made by other versions, or for another GPU.
    """
    try:
        content = path.read_bytes()  # once: another file may take its place
    except OSError as error:
        raise NotACache(path=path, reason=error.strerror or "it cannot be read") from None
    if (found := _digest(content)) != digest.strip().lower():
        raise WrongCache(path=path, found=found, expected=digest)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _compare(path, dict(json.loads(archive.read(MANIFEST))["made_by"]))
            # Inductor may keep Triton's folder inside its own here, where it did not there
            placed = [_place(archive, root, folder) for root, folder in {"triton": triton_cache(), **roots()}.items()]
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
        raise NotACache(path=path, reason=str(error)) from None
    files, size, kept = map(sum, zip(*placed))
    return Archive(found, files, size, kept)


def _place(archive: zipfile.ZipFile, root: str, folder: Path) -> tuple[int, int, int]:
    """Move an archive's files of one root into its folder, each whole or not at all, and none to another place.

    Returns:
        How many there are, their bytes, and how many were there.
    """
    members = [each for each in archive.infolist() if each.filename.startswith(f"{root}/")]
    if not members:
        return 0, 0, 0
    kept = 0
    make_private(folder)
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        archive.extractall(draft, members)  # which drops what leads out of a folder from names
        made = Path(draft, root)
        for file in [file for file in made.rglob("*") if file.is_file()]:
            target = folder / file.relative_to(made)
            if target.exists():
                kept += 1
                continue
            make_private(target.parent)
            os.replace(file, target)
    return len(members), sum(each.file_size for each in members), kept


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for file in [Path(where, name) for name in names if not name.endswith((".lock", ".tmp"))]:
            if file.is_file():
                yield file.relative_to(folder).as_posix(), file


def _cpu() -> str:
    """The CPU's instructions, which code may use that was compiled here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{torch.backends.cpu.get_cpu_capability()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _compare(path: Path, made_by: dict[str, Any]) -> None:
    here = describe(native=made_by.get("cpu") is not None)
    other = [
        f"{name} {_shown(made_by.get(name))} there, {_shown(here.get(name))} here"
        for name in dict.fromkeys((*here, *made_by))
        if made_by.get(name) != here.get(name)
    ]
    if other:
        raise CacheDiffers(path=path, differences="; ".join(other))


def _shown(value: Any) -> str:
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value or "")) or "none"
