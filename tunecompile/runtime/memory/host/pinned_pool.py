"""Host memory for saved activations, and the copies between it and the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

GRANULE = 2 << 20  #: bytes, to which blocks are rounded up
SLAB = 512 << 20  #: bytes allocated at once; a power of two, since torch rounds pinned memory up to the next


@dataclass
class PinnedBlock:
    """Host memory of one block: pieces of slabs, in the order of its bytes."""

    nbytes: int
    extents: list[tuple[int, int, int]]  #: (slab, begin, end)
    pieces: list[Tensor]
    kept: Tensor | None = None  #: the block itself, where nothing is copied

    def beside(self, device: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(piece, its part of the block's bytes on the device)."""
        begin = 0
        for piece in self.pieces:
            yield piece, device[begin : begin + piece.numel()]
            begin += piece.numel()


class Ahead:
    """Slabs that a thread allocates, one after the other, in the order in which they are taken.

    The thread is a daemon.
    """

    def __init__(self, count: int, allocate: Callable[[], Tensor]):
        self.left, self._made = count, SimpleQueue()
        threading.Thread(
            target=self._make, args=(count, allocate, self._made), name="tunecompile-host-memory", daemon=True
        ).start()

    @staticmethod
    def _make(count: int, allocate: Callable[[], Tensor], made: SimpleQueue) -> None:
        for _ in range(count):
            try:
                made.put(allocate())
            except Exception as error:  # raised by `take`
                made.put(error)
                return

    def take(self) -> Tensor:
        """The next slab; waits until it is there.

        Raises:
            Exception: as it was raised in the thread, which ended then.
        """
        made, self.left = self._made.get(), self.left - 1
        if isinstance(made, Exception):
            self.left = 0
            raise made
        return made


class PinnedPool:
    """Host memory, allocated when first needed, or ahead where bytes are expected, and kept for the next step.

    A block may be split over several ranges, so free memory is never too scattered to be used.

    Args:
        limit: bytes that may be allocated in all.
        allocate: bytes -> memory; a RuntimeError (nothing left to pin) ends growth, and `failure` says why.
    """

    def __init__(self, limit: int, allocate: Callable[[int], Tensor], granule: int = GRANULE, slab: int = SLAB):
        self.limit, self.allocate, self.granule, self.slab = limit, allocate, granule, slab
        self.slabs: list[Tensor] = []
        self.free: list[tuple[int, int, int]] = []  #: (slab, begin, end), in order, never touching each other
        self.reserved = self.used = self.peak = 0  #: bytes
        self.failure: str | None = None
        self.ahead: Ahead | None = None

    def expect(self, nbytes: int) -> None:
        """Begin to allocate bytes, in whole slabs, in another thread: to pin memory takes 0.5 to 1 s a GiB."""
        missing = (min(nbytes, self.limit) - self.reserved) // self.slab
        if missing > 0 and not self._coming and self.failure is None:
            self.ahead = Ahead(missing, lambda: self.allocate(self.slab))

    def take(self, nbytes: int) -> PinnedBlock | None:
        """Memory for a block; None where there is too little."""
        need = -(-nbytes // self.granule) * self.granule
        while self.reserved - self.used < need:
            if not self._grow(need - (self.reserved - self.used)):
                return None
        extents = self._cut(need)
        self.used += need
        self.peak = max(self.peak, self.used)
        pieces, left = [], nbytes
        for slab, begin, end in extents:
            pieces.append(self.slabs[slab][begin : min(end, begin + left)])
            left -= pieces[-1].numel()
        return PinnedBlock(nbytes, extents, pieces)

    def give(self, room: PinnedBlock) -> None:
        """Take a block back. Its pending copies must be ordered before those of the next owner."""
        self.used -= sum(end - begin for _, begin, end in room.extents)
        merged: list[tuple[int, int, int]] = []
        for slab, begin, end in sorted(self.free + room.extents):
            if merged and merged[-1][0] == slab and merged[-1][2] == begin:
                begin = merged.pop()[1]
            merged.append((slab, begin, end))
        self.free = merged

    @property
    def room(self) -> int:
        """Bytes that can still be taken."""
        return self.limit - self.used if self.failure is None else self.reserved - self.used

    @property
    def _coming(self) -> bool:
        """Whether slabs are under way."""
        return self.ahead is not None and self.ahead.left > 0

    def _cut(self, need: int) -> list[tuple[int, int, int]]:
        """The first extent that is long enough, or the first ones together."""
        whole = next((extent for extent in self.free if extent[2] - extent[1] >= need), None)
        taken = []
        for extent in [whole] if whole else list(self.free):
            slab, begin, end = extent
            at = self.free.index(extent)
            stop = min(end, begin + need)
            self.free[at : at + 1] = [(slab, stop, end)] if stop < end else []
            taken.append((slab, begin, stop))
            need -= stop - begin
            if not need:
                break
        return taken

    def _grow(self, missing: int) -> bool:
        left = (self.limit - self.reserved) // self.granule * self.granule
        if left < missing or self.failure is not None:
            return False
        size = 1 << (min(left, self.slab).bit_length() - 1)
        try:
            self.slabs.append(self.ahead.take() if size == self.slab and self._coming else self.allocate(size))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self.failure = (
                f"no more pinned memory than {self.reserved >> 20} MiB: {str(error).strip().splitlines()[0][:200]}"
            )
            return False
        self.free.append((len(self.slabs) - 1, 0, size))
        self.reserved += size
        return True


def available() -> int:
    """Bytes of host memory that machine and container leave free now; 0 where that is not known."""
    found = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    limit, current = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and current.isdigit():
        found.append(max(0, int(limit) - int(current)))
    if not found and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@dataclass
class CopyMark:
    """The end of a batch of copies."""

    begin: Any = None
    end: Any = None
    stream: Any = None  #: that computes: it made the tensors that are copied, or will use them
    waited: bool = False  #: whether `stream` comes after it already

    def synchronize(self) -> None:
        """Have the host wait."""
        if self.end is not None:
            self.end.synchronize()


class CopyEngine(Protocol):
    """Copies blocks, in order in each direction, while the device computes."""

    moves: bool  #: whether copies take place

    def allocate(self, nbytes: int) -> Tensor:
        """New host memory of this many bytes."""

    def out(self, pairs: Sequence[tuple[Tensor, PinnedBlock]]) -> CopyMark:
        """Copy to the host, behind the work that is queued on the device."""

    def back(self, rooms: Sequence[PinnedBlock]) -> tuple[list[Tensor], CopyMark]:
        """Copy to new memory on the device. It may be used, or freed, once `wait` was called."""

    def wait(self, mark: CopyMark, used: Tensor | None = None) -> None:
        """Order all work of the device from now on behind the mark. used: the memory that the work uses."""

    def order(self, mark: CopyMark) -> None:
        """Order all copies to the host from now on behind the mark."""

    def fence(self) -> list[CopyMark]:
        """The end of all copies up to now, in each direction."""

    def times(self) -> dict[str, float]:
        """Milliseconds since `reset`: copied_out_ms, copied_back_ms, and exposed_ms of the device's waits."""

    def reset(self) -> None:
        """Begin to count the times anew."""


class ResidentCopyEngine:
    """Copies nothing: every tensor stays where it is, so that plans can run without a device."""

    moves = False

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def out(self, pairs: Sequence[tuple[Tensor, PinnedBlock]]) -> CopyMark:
        for device, room in pairs:
            room.kept = device
        return CopyMark()

    def back(self, rooms: Sequence[PinnedBlock]) -> tuple[list[Tensor], CopyMark]:
        return [room.kept for room in rooms], CopyMark()

    def wait(self, mark: CopyMark, used: Tensor | None = None) -> None: ...

    def order(self, mark: CopyMark) -> None: ...

    def fence(self) -> list[CopyMark]:
        return []

    def times(self) -> dict[str, float]:
        return {}

    def reset(self) -> None: ...


@dataclass
class CudaCopyEngine:
    """One stream out and one back, since a GPU copies in both directions at once. The host never waits.

    The host is far ahead of the device. A query of an event would nearly always say that it has not passed, so that no
    memory would be freed. So the computing stream waits for events instead, one layer after a copy was launched, when
    it is long done.
    """

    moves = True

    device: torch.device
    copies: dict[str, list[CopyMark]] = field(default_factory=lambda: {"out": [], "back": []})
    waits: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outward, self.inward = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def allocate(self, nbytes: int) -> Tensor:
        with torch.cuda.device(self.device):  # a new thread begins on the first GPU, where it would make a context
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def out(self, pairs: Sequence[tuple[Tensor, PinnedBlock]]) -> CopyMark:
        return self._copy(
            "out", self.outward, [(piece, part) for device, room in pairs for piece, part in room.beside(device)]
        )

    def back(self, rooms: Sequence[PinnedBlock]) -> tuple[list[Tensor], CopyMark]:
        # The memory is the computing stream's. The allocator may reuse blocks at once whose last use on the device is
        # still pending:
        # `_copy` begins behind all work that this stream has been given.
        devices = [torch.empty(room.nbytes, dtype=torch.uint8, device=self.device) for room in rooms]
        pairs = [(part, piece) for device, room in zip(devices, rooms) for piece, part in room.beside(device)]
        return devices, self._copy("back", self.inward, pairs)

    def _copy(self, direction: str, stream: torch.cuda.Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyMark:
        mark = CopyMark(
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
            torch.cuda.current_stream(self.device),
        )
        stream.wait_stream(mark.stream)
        with torch.cuda.stream(stream):
            mark.begin.record(stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            mark.end.record(stream)
        self.copies[direction].append(mark)
        return mark

    def wait(self, mark: CopyMark, used: Tensor | None = None) -> None:
        stream = torch.cuda.current_stream(self.device)
        if stream != mark.stream and used is not None:
            used.record_stream(stream)  # or the allocator would give the memory to `mark.stream` again too early
        elif mark.waited:
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        stream.wait_event(mark.end)
        end.record(stream)
        self.waits.append((begin, end))
        mark.waited = mark.waited or stream == mark.stream

    def order(self, mark: CopyMark) -> None:
        self.outward.wait_event(mark.end)

    def fence(self) -> list[CopyMark]:
        return [CopyMark(end=stream.record_event()) for stream in (self.outward, self.inward)]

    def times(self) -> dict[str, float]:
        def total(pairs: Sequence[tuple[Any, Any]]) -> float:
            for _, end in pairs:
                end.synchronize()
            return sum(begin.elapsed_time(end) for begin, end in pairs)

        out, back = ([(mark.begin, mark.end) for mark in self.copies[direction]] for direction in ("out", "back"))
        return {"copied_out_ms": total(out), "copied_back_ms": total(back), "exposed_ms": total(self.waits)}

    def reset(self) -> None:
        self.copies = {"out": [], "back": []}
        self.waits.clear()
