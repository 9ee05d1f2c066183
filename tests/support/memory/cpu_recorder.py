"""A stand-in on the CPU for what records and replays CUDA graphs."""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch


class CpuRecorder:
    """Runs the function again and writes into the first outputs' memory.

    As in a pool of CUDA graphs, a recording's scratch may be where later recordings of its pool have their outputs, and
    where earlier ones had those that they gave back: each replay overwrites these.
    """

    device = "cpu"

    def __init__(self):
        self.pools = defaultdict(list)
        self.given_back = {}  #: by address: what replays the recording

    def record(self, run, pool, device):
        first, second = list(run()), list(run())
        own = [
            old for old, new in zip(first, second) if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr()
        ]
        for value in own:  # recording computes nothing
            poison(value)
        recordings = self.pools[pool]
        number = len(recordings)
        before = [
            ref for refs in recordings for ref in refs if (v := ref()) is not None and v.data_ptr() in self.given_back
        ]
        recordings.append([weakref.ref(value) for value in own])

        def play():
            for ref in before + [ref for later in recordings[number + 1 :] for ref in later]:
                if (value := ref()) is not None:
                    poison(value)
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

    taken = 0

    def memory(self, device):
        self.taken += 100
        return self.taken, 10_000

    releases = 0

    def release(self):
        self.releases += 1

    def forget(self):
        pass


def poison(value):
    """As memory is that something else was written to."""
    value.data.fill_(float("nan") if value.is_floating_point() else 1)
