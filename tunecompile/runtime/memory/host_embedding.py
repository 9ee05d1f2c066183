"""Embedding tables in host memory, from which the GPU reads the rows it needs.

A step reads one row a token: 8,192 tokens of an 8B model are 64 MiB, a millisecond over PCIe, out of a table of 1 GiB.
Pinned memory has an address on the GPU, so the parameter stays a tensor of the GPU for lookups, `generate()`, saving
and `model.device`; only its memory is the host's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.notes import Note, note
from tunecompile.planner.device_memory import shown

SMALLEST = 16 << 20  #: bytes, below which a table is not worth a note


class _Pinned:
    """Pinned bytes behind CUDA's array interface: torch makes a GPU tensor of this object and keeps it alive."""

    def __init__(self, memory: Tensor):
        self.memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": tuple(self.memory.shape),
            "typestr": "|u1",
            "data": (self.memory.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def in_host_memory(tensor: Tensor) -> Tensor:
    """The same values, device, dtype and shape, in pinned host memory."""
    pinned = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    pinned.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return torch.as_tensor(_Pinned(pinned), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def tables(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[Note]]:
    """Frozen tables that only lookups read, by name, and a note for each table that stays on its device."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    moved, notes = [], []
    for name, module in found:
        table = module.weight
        reasons = {
            "table-trained": table.requires_grad,
            "table-shared": owners[id(table)] > 1,
            "table-not-plain": type(table) is not nn.Parameter,
            "table-renormalises": module.max_norm is not None,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is None and table.nbytes >= SMALLEST:
            moved.append((f"{name}.weight", table))
        elif reason is not None:
            notes.append(note("embedding-on-device", f"{name}.weight", note(reason)))
    return moved, notes if found else [note("no-embedding")]


class HostEmbeddings:
    """The tables of a model that were moved."""

    def __init__(self, move: Callable[[Tensor], Tensor] = in_host_memory):
        self.move = move
        self.moved: dict[str, nn.Parameter] = {}
        self.notes: list[Note] = []
        self.pending = True  #: whether more tables may come to a GPU

    def take(self, model: nn.Module) -> None:
        """Move the tables that lie on a GPU. Call it again, while some are pending, once the model may be there."""
        found, self.notes = tables(model)
        for name, table in found:
            if name not in self.moved and table.is_cuda:
                table.data = self.move(table.data)
                self.moved[name] = table
        self.pending = len(self.moved) < len(found)

    def give_back(self) -> None:
        for table in self.moved.values():
            table.data = table.data.clone()
        self.moved.clear()

    def report_notes(self) -> list[Note]:
        """For the report."""
        return self.notes + [note("embedding-on-host", name, shown(table.nbytes)) for name, table in self.moved.items()]
