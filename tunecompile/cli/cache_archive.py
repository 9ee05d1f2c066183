"""Compiled code and measured choices in one file, for other machines of the same kind: `tunecompile cache`.

torch unpickles and runs what lies in its cache folders, so a file is taken only with the SHA-256 that whoever saved it
tells. What it was made by (versions, the source of this package, GPU) has to be what is here. Nothing of it is
unpickled or run while it is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch

from tunecompile._torch.inductor import cache_folder
from tunecompile.cli.toolchain import triton_cache
from tunecompile.compiler.compile_cache import make_private
from tunecompile.compiler.partitioner import source_hash
from tunecompile.errors import CacheDiffers, NotACache, NothingToSave, WrongCache

FORMAT = 1  #: of the file
MANIFEST = "manifest.json"
LEFT_OUT = ("locks", "turns")  #: folders of a process's moment
BLOCK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """What was saved or loaded."""

    path: Path
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
    files: dict[str, str] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    size = 0
    try:
        with os.fdopen(handle, "wb") as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, file in found.items():
                try:
                    content = file.read_bytes()
                except FileNotFoundError:  # another process writes there
                    continue
                files[name] = hashlib.sha256(content).hexdigest()
                archive.writestr(name, content)
                size += len(content)
            manifest = {"format": FORMAT, "made_by": describe(native), "files": files}
            archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
    with _opened(path) as file:
        return Archive(path, _digest(file), len(files), size)


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
    places = roots()
    with _opened(path) as file:
        found = _digest(file)
        if found != digest.strip().lower():
            raise WrongCache(path=path, found=found, expected=digest)
        archive = _archive(path, file)  # of the same open file, which another one may have replaced since
        manifest = _manifest(path, archive)
        _compare(path, manifest["made_by"])
        targets = {name: _target(path, name, places) for name in manifest["files"]}
        size = kept = 0
        for name, target in targets.items():
            content = _content(path, archive, name)
            if hashlib.sha256(content).hexdigest() != manifest["files"][name]:
                raise NotACache(path=path, reason=f"{name} is damaged")
            size += len(content)
            kept += not _place(content, target)
    return Archive(path, found, len(targets), size, kept)


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise NotACache(path=path, reason=error.strerror or "it cannot be read") from None


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := file.read(BLOCK):
        digest.update(block)
    file.seek(0)
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in names:
            file = Path(where, name)
            if not name.endswith((".lock", ".tmp")) and file.is_file():
                yield file.relative_to(folder).as_posix(), file


def _cpu() -> str:
    """The CPU's instructions, which code may use that was compiled here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{torch.backends.cpu.get_cpu_capability()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _archive(path: Path, file: IO[bytes]) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile:
        raise NotACache(path=path, reason="it is no zip file") from None


def _manifest(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    try:
        manifest = json.loads(archive.read(MANIFEST))
        known = manifest["format"] == FORMAT
        manifest["made_by"]["torch"], manifest["files"].items()
    except (KeyError, ValueError, TypeError, AttributeError):
        raise NotACache(path=path, reason=f"it has no {MANIFEST} of one") from None
    if not known:
        raise NotACache(path=path, reason=f"it has the format {manifest['format']}, and this version reads {FORMAT}")
    return manifest


def _content(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except (KeyError, zipfile.BadZipFile):
        raise NotACache(path=path, reason=f"it has no {name}, or a damaged one") from None


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


def _target(path: Path, name: str, places: dict[str, Path]) -> Path:
    """Where a file of an archive goes: below the folder of its root."""
    root, *parts = PurePosixPath(name).parts or ("",)
    if root == "triton" and root not in places:  # which Inductor keeps inside its own folder here
        places = {**places, root: triton_cache()}
    if root not in places or not parts or any(part == ".." or set(part) & set('\\:"') for part in parts):
        raise NotACache(path=path, reason=f"it has a file {name!r}")
    return places[root].joinpath(*parts)


def _place(content: bytes, target: Path) -> bool:
    """Write a file whole or not at all. Whether it was not there."""
    if target.exists():
        return False
    make_private(target.parent)
    handle, draft = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(draft, target)
    return True
