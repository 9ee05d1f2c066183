"""Where offloaded blocks lie: in host memory, and on disk what that cannot hold.

A plain file for each, written and read by one thread.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunecompile.runtime.memory.host.pinned_pool import CopyEngine, CopyMark, PinnedBlock, PinnedPool


@dataclass
class DiskFile:
    """A block's file, and the job that is writing or reading it."""

    path: Path
    job: Future
    reading: bool = False


@dataclass(eq=False)
class StoredBlock:
    """A block's copy away from the device."""

    nbytes: int
    room: PinnedBlock | None
    mark: CopyMark | None = None  #: of the last copy from or to `room`; None before it was ever filled
    file: DiskFile | None = None


class BlockStore:
    """Host memory, and behind it the disk. Blocks are needed again last in, first out, so the oldest go to disk.

    Writing begins when memory for two more layers is missing, so that it is mostly done when that memory is needed.
    """

    def __init__(self, pool: PinnedPool, copier: CopyEngine, disk: Disk | None = None):
        self.pool, self.copier, self.disk = pool, copier, disk
        self.stays: deque[StoredBlock] = deque()  #: filled, the oldest first
        self.blocked_ms = 0.0  #: the host's, waiting for the disk
        self.written = 0  #: bytes
        self.failure: str | None = None

    def take(self, nbytes: int) -> StoredBlock | None:
        """Memory for a block; None where neither host memory nor the disk has room."""
        room = self.pool.take(nbytes)
        while room is None and self._free_oldest():
            room = self.pool.take(nbytes)
        return StoredBlock(nbytes, room) if room is not None else None

    def why_not(self) -> str:
        return self.pool.failure or self.failure or "host memory is full"

    def filled(self, stays: Sequence[StoredBlock], mark: CopyMark) -> None:
        """These blocks are filled behind the mark: the oldest ones may go to disk."""
        for stay in stays:
            stay.mark = mark
        self.stays.extend(stays)
        if self.disk is not None and self.failure is None:
            ahead = 2 * sum(stay.nbytes for stay in stays) - self.pool.room
            for stay in self.stays:
                if ahead > 0 and stay.room is not None:
                    self._write(stay)
                    ahead -= stay.nbytes

    def give(self, stay: StoredBlock) -> None:
        """Free a block."""
        if stay.file is not None:
            self._waiting(lambda: self.disk.delete(stay.file))
        if stay.room is not None:
            self._give_room(stay)
        if stay.mark is not None:
            self.stays.remove(stay)

    def prepare(self, stay: StoredBlock) -> None:
        """A block will be loaded soon: begin to read it, if it is on disk and there is room."""
        if stay.room is None and (room := self.pool.take(stay.nbytes)) is not None:
            stay.room = room
            self.disk.read(stay.file, room, self.copier.fence())

    def ready(self, stay: StoredBlock) -> bool:
        """Whether `load` would not wait."""
        return stay.room is not None and not (stay.file is not None and stay.file.reading and not stay.file.job.done())

    def load(self, stay: StoredBlock) -> PinnedBlock:
        """The block's memory, filled.

        Raises:
            OSError: its file cannot be read.
        """
        self.prepare(stay)
        if stay.room is None:  # memory of its own, not pinned: slow, but never refused
            stay.room = PinnedBlock(stay.nbytes, [], [torch.empty(stay.nbytes, dtype=torch.uint8, device="cpu")])
            self.disk.read(stay.file, stay.room, [])
        if stay.file is not None and stay.file.reading:
            self._waiting(stay.file.job.result)
            stay.file.reading = False
        elif stay.file is not None and stay.file.job.cancel():  # it was not written yet, and stays in memory
            stay.file = None
        return stay.room

    def _free_oldest(self) -> bool:
        """Free the memory of the oldest block, as soon as it is on disk. Returns whether that is possible."""
        if self.disk is None or self.failure is not None:
            return False
        stay = next((stay for stay in self.stays if stay.room is not None and stay.room.extents), None)
        if stay is None:
            return False
        self._write(stay)
        error = self._waiting(stay.file.job.exception)
        # what could not be read ahead is still on disk: `load` reads it again, and says why it cannot
        if error is not None and not stay.file.reading:  # the disk is full: training goes on without it
            self.failure = f"no more room on disk: {error}"
            self.disk.delete(stay.file)
            stay.file = None
            return False
        self._give_room(stay)
        return True

    def _write(self, stay: StoredBlock) -> None:
        if stay.file is None:
            stay.file = self.disk.write(stay.room, stay.mark)
            self.written += stay.nbytes

    def _give_room(self, stay: StoredBlock) -> None:
        if stay.mark is not None:
            self.copier.order(stay.mark)
        self.pool.give(stay.room)
        stay.room = None

    def _waiting(self, run: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            return run()
        finally:
            self.blocked_ms += (time.perf_counter() - begun) * 1e3


class Disk:
    """Files in a folder of its own within `folder`, deleted one by one, and all at the interpreter's exit.

    One thread reads and writes, in the order of the calls. Only this thread waits for the device's copies.

    Raises:
        OSError: `folder` cannot be written to.
    """

    def __init__(self, folder: Path):
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.folder = tempfile.TemporaryDirectory(prefix="tunecompile-", dir=folder, ignore_cleanup_errors=True)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="tunecompile-offload")
        self.files = 0

    def write(self, room: PinnedBlock, after: CopyMark) -> DiskFile:
        """Write the bytes that `room` holds behind the mark. The job fails with an OSError where the disk is full."""
        self.files += 1
        path = Path(self.folder.name) / str(self.files)
        return DiskFile(path, self.worker.submit(_write, path, room.pieces, after))

    def read(self, file: DiskFile, room: PinnedBlock, after: Sequence[CopyMark]) -> None:
        """Read into `room`. The copies of its last owner end with the marks."""
        file.job, file.reading = self.worker.submit(_read, file.path, room.pieces, after), True

    def delete(self, file: DiskFile) -> None:
        """Delete a file that is not needed. Waits for its running job, since the job's memory gets another owner."""
        if not file.job.cancel():
            file.job.exception()
        file.path.unlink(missing_ok=True)


def _write(path: Path, pieces: Sequence[Tensor], after: CopyMark) -> None:
    after.synchronize()
    with open(path, "wb", buffering=0) as file:
        for piece in pieces:
            rest = _bytes(piece)
            while rest:  # the system may write less than it is asked to
                rest = rest[file.write(rest) :]


def _read(path: Path, pieces: Sequence[Tensor], after: Sequence[CopyMark]) -> None:
    for mark in after:
        mark.synchronize()
    with open(path, "rb", buffering=0) as file:
        for piece in pieces:
            rest = _bytes(piece)
            while rest:
                read = file.readinto(rest)
                if not read:
                    raise OSError(f"{path} is shorter than what was written to it")
                rest = rest[read:]


def _bytes(piece: Tensor) -> memoryview:
    return memoryview((ctypes.c_ubyte * piece.numel()).from_address(piece.data_ptr()))
