"""A stand-in on the CPU for what records and replays CUDA graphs."""

from __future__ import annotations

import torch


class CpuRecorder:
    """Runs the function again and writes into the first outputs' memory."""

    device = "cpu"

    def record(self, run, pool, device):
        first, second = list(run()), list(run())
        own = [
            old for old, new in zip(first, second) if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr()
        ]
        for value in own:  # recording computes nothing
            value.fill_(float("nan") if value.is_floating_point() else 1)

        def play():
            for old, new in zip(first, run()):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        return first, play

    def mark(self, device):
        return None

    def elapsed(self, begin, end):
        return 0.0

    taken = 0

    def memory(self, device):
        self.taken += 100
        return self.taken, 10_000

    releases = 0

    def release(self):
        self.releases += 1

    def forget(self):
        pass
