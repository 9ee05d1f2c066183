"""Copies from host memory to host memory, in the place of a GPU's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile.runtime.memory.host.pinned_pool import CopyMark, PinnedBlock, ResidentCopyEngine


class HostCopyEngine(ResidentCopyEngine):
    """Copies at once: the runtime's logic, without streams."""

    moves = True

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def out(self, pairs: Sequence[tuple[Tensor, PinnedBlock]]) -> CopyMark:
        for device, room in pairs:
            for piece, part in room.beside(device):
                piece.copy_(part)
        return CopyMark()

    def back(self, rooms: Sequence[PinnedBlock]) -> tuple[list[Tensor], CopyMark]:
        devices = [torch.empty(room.nbytes, dtype=torch.uint8) for room in rooms]
        for device, room in zip(devices, rooms):
            for piece, part in room.beside(device):
                part.copy_(piece)
        return devices, CopyMark()
