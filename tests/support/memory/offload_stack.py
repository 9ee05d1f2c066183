"""A stack of small layers, alone or under a runtime, and compiled layers wrapped as the runtime's caller wraps them."""

from __future__ import annotations

import contextlib
import gc

import torch
from torch import nn

from tests.support.memory.copy_engine import HostCopyEngine
from tunecompile.runtime.memory.offload import Offload


class Layer(nn.Module):
    """Saves its input, two views of one storage, and its weights."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


class Stack(nn.Module):
    def __init__(self, layers: int = 6, width: int = 32, keep_last: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.offload: Offload | None = None
        self.keep_last = keep_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.offload is not None:
            self.offload.begin_step()
        for index, layer in enumerate(self.layers):
            kept = self.keep_last and index == len(self.layers) - 1
            with (
                self.offload.layer(index, layer, (lambda tensor: False) if kept else None)
                if self.offload
                else contextlib.nullcontext()
            ):
                x = layer(x)
        return x.square().mean()

    def gradients(self) -> list[torch.Tensor]:
        found = [parameter.grad.clone() for parameter in self.parameters()]
        self.zero_grad(set_to_none=True)
        return found


class Wrapped:
    """Stands for a slot: its call inside the runtime's context."""

    def __init__(self, slot, index: int, offload: Offload):
        self.slot, self.index, self.offload = slot, index, offload

    def __call__(self, *args, **kwargs):
        with self.offload.layer(self.index, self.slot.layer):
            return self.slot(*args, **kwargs)

    def note_eager(self) -> None:
        self.slot.note_eager()


def wrap(model: nn.Module, offload: Offload) -> None:
    """Every compiled layer of an optimized model."""
    for index, slot in enumerate(model._tunecompile.slots):
        slot.layer._compiled_call_impl = Wrapped(slot, index, offload)


def make_offload(host_bytes=1 << 26, **options) -> Offload:
    return Offload(torch.device("cpu"), host_bytes, smallest=256, **{"copier": HostCopyEngine(), **options})


def inputs(seed=0) -> torch.Tensor:
    return torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(seed))


def plain(x: torch.Tensor, **options) -> tuple:
    stack = Stack(**options)
    loss = stack(x)
    loss.backward()
    return loss.detach(), stack.gradients()


def run(stack: Stack, x: torch.Tensor) -> tuple:
    loss = stack(x)
    loss.backward()
    return loss.detach(), stack.gradients()


def offloaded(offload: Offload, **options) -> Stack:
    stack = Stack(**options)
    stack.offload = offload
    return stack


def empty(offload: Offload) -> bool:
    gc.collect()
    return offload.report()["host_bytes"] == 0 and not offload.calls and not offload.blocks.known


def files(folder) -> list:
    return [path for path in folder.rglob("*") if path.is_file()]
