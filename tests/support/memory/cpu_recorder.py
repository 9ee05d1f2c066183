"""A stand-in on the CPU for what records and replays CUDA graphs."""

from __future__ import annotations

import ctypes
from collections import defaultdict

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class CpuRecorder:
    """Runs the function again and writes into the first outputs' memory.

    As in a pool of CUDA graphs, a recording's scratch may be where later recordings of its pool have their outputs, and
    where earlier ones had those that they gave back: each replay overwrites these, whoever holds them by then.
    """

    device = "cpu"

    def __init__(self):
        self.pools = defaultdict(list)
        self.given_back = {}  #: by address: what replays the recording

    def record(self, run, pool, device):
        hold_no_tensors(run)
        first, second = list(run()), list(run())
        own = [
            old for old, new in zip(first, second) if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr()
        ]
        for value in own:  # recording computes nothing
            poison(value)
        recordings = self.pools[pool]
        number = len(recordings)
        before = [memory for made in recordings for memory in made if memory.address in self.given_back]
        recordings.append([Memory(value) for value in own])

        def play():
            for memory in before + [memory for later in recordings[number + 1 :] for memory in later]:
                memory.poison()
            for old, new in zip(first, run()):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        return first, play

    def give_back(self, value, play):
        self.given_back[value.data_ptr()] = play
        return value

    def mark(self, device):
        return None

    def elapsed(self, begin, end):
        return 0.0

    def occupy(self, device, milliseconds):
        pass

    taken, total = 0, 10**9  #: bytes

    def memory(self, device):
        self.taken += 100
        return self.taken, self.total

    releases = 0

    def release(self):
        self.releases += 1

    def forget(self):
        pass


def hold_no_tensors(run):
    """A CUDA graph reads where its inputs lay, and does not hold them: others are given, that lie there."""
    for cell in run.__closure__ or ():
        if isinstance(given := cell.cell_contents, list):
            given[:] = [
                value.detach()
                if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
                else value
                for value in given
            ]


class Memory:
    """The memory of an output, without a claim to it: it is there while any tensor holds it."""

    def __init__(self, value):
        storage = value.untyped_storage()
        self.address, self.nbytes, self.held = storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)
        self.byte = 0xFF if value.is_floating_point() else value.element_size() == 1  # not a number; else 1 or 0

    def poison(self):
        if not self.held.expired():
            ctypes.memset(self.address, int(self.byte), self.nbytes)


def poison(value):
    """As memory is that something else was written to."""
    value.data.fill_(float("nan") if value.is_floating_point() else 1)
