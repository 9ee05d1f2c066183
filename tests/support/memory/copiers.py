"""Copy engines for tests: one that logs, and one with the worst timing that streams allow."""

from __future__ import annotations

import ctypes
import threading
from collections import deque

import torch

from tests.support.memory.copy_engine import HostCopyEngine
from tunecompile.runtime.memory.host.pinned_pool import CopyMark


class Recorder(HostCopyEngine):
    """Also says what was copied back, in order."""

    def __init__(self):
        self.log: list[tuple[str, int]] = []

    def out(self, pairs):
        self.log.append(("out", len(pairs)))
        return super().out(pairs)

    def back(self, rooms):
        self.log.append(("back", len(rooms)))
        return super().back(rooms)


class LateCopier(HostCopyEngine):
    """Copies as late as streams and events allow, and would read garbage where something was not ordered."""

    def __init__(self):
        self.queues: dict[str, deque] = {"out": deque(), "back": deque()}
        self.lock = threading.RLock()  # the disk's thread synchronizes, too

    def out(self, pairs):
        return self._ask(
            "out", [(device.data_ptr(), room) for device, room in pairs], to_host=True
        )  # without holding it

    def back(self, rooms):
        devices = [torch.full((room.nbytes,), 255, dtype=torch.uint8) for room in rooms]  # NaN
        return devices, self._ask(
            "back", [(device.data_ptr(), room) for device, room in zip(devices, rooms)], to_host=False
        )

    def wait(self, mark, used=None):
        mark.end.synchronize()
        mark.waited = True

    def order(self, mark):
        self.queues["out"].append((None, mark.end.synchronize))

    def fence(self):
        return [self._ask(direction, [], True) for direction in self.queues]

    def _ask(self, direction, jobs, to_host):
        def run():
            for address, room in jobs:
                for piece in room.pieces:
                    pair = (piece.data_ptr(), address) if to_host else (address, piece.data_ptr())
                    ctypes.memmove(*pair, piece.numel())
                    address += piece.numel()

        mark = CopyMark(end=Later(self, direction))
        self.queues[direction].append((mark.end, run))
        return mark


class Later:
    """An event: who waits for it does what was asked for in its direction up to it."""

    def __init__(self, copier, direction):
        self.copier, self.direction, self.passed = copier, direction, False

    def synchronize(self):
        with self.copier.lock:
            queue = self.copier.queues[self.direction]
            while not self.passed:
                event, run = queue.popleft()
                run()
                if event is not None:
                    event.passed = True
