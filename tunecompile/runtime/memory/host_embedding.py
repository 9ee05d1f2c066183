"""Embedding tables in host memory, from which the GPU reads the rows it needs.

A step reads one row a token: 8,192 tokens of an 8B model are 64 MiB, a millisecond over PCIe, out of a table of 1 GiB. Pinned memory has an address
on the GPU, so the parameter stays a tensor of the GPU, for lookups, `generate()`, saving and `model.device` alike; only its memory is the host's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.planner.device_memory import shown

SMALLEST = 16 << 20  #: bytes, below which a table is not worth a note


class _Pinned:
    """Pinned bytes, as CUDA's array interface shows them: torch makes a tensor of the GPU of it, which keeps this."""

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
    pinned = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return torch.as_tensor(_Pinned(pinned), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def tables(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[str]]:
    """Frozen tables that only lookups read, by name, and what is said of those that stay where they are."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    moved, notes = [], []
    for name, module in found:
        table = module.weight
        reason = (
            "it is trained"
            if table.requires_grad
            else "another module shares it"
            if owners[id(table)] > 1
            else "it is no plain tensor"
            if type(table) is not nn.Parameter
            else "it renormalises the rows it reads"
            if module.max_norm is not None
            else None
        )
        if reason is None and table.nbytes >= SMALLEST:
            moved.append((f"{name}.weight", table))
        elif reason is not None:
            notes.append(f"{name}.weight stays on the device: {reason}")
    return moved, notes if found else ["host_embedding: the model has no nn.Embedding"]


class HostEmbeddings:
    """Which of a model's tables were moved, and how they come back."""

    def __init__(self, move: Callable[[Tensor], Tensor] = in_host_memory):
        self.move = move
        self.moved: dict[str, nn.Parameter] = {}
        self.notes: list[str] = []
        self.pending = True  #: whether there are some that may come to a GPU yet

    def take(self, model: nn.Module) -> None:
        """Move those that lie on a GPU. Call it again, while some are pending, once the model may be there."""
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

    def said(self) -> list[str]:
        """For the report."""
        return self.notes + [
            f"{name} ({shown(table.nbytes)}) lies in host memory" for name, table in self.moved.items()
        ]
