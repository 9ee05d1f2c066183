"""A budget for each device that a model's layers are on (`device_map`). Devices run one after the other, and each is full by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from tunecompile._torch.cuda import grow_segments
from tunecompile.planner.device_memory import Spec, gauge_of
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.layer_slot import LayerSlot
from tunecompile.runtime.loss_head import Head
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.offload import Offload
from tunecompile.runtime.memory.oom_recovery import sharded
from tunecompile.runtime.memory.pinned_pool import available
from tunecompile.runtime.memory.weight_cache import WeightCache
from tunecompile.runtime.region import Region


class Planned(Protocol):
    """What a model's state says of the memory that its layers may take."""

    model: nn.Module
    memory: Spec
    host_bytes: int | None
    offload_dir: Path | None
    precision: str | None
    slots: list[LayerSlot]
    heads: list[Head]
    regions: list[Region]
    replays: GraphReplays
    kept: WeightCache
    notes: list[str]


def make_budgets(state: Planned) -> tuple[RuntimePlanner, ...]:
    """As `memory=` has it: the same for each device, and host memory in equal shares. Empty where nothing can be planned."""
    placed = by_device(state.slots)
    if left := len(state.slots) - sum(map(len, placed.values())):
        where = " or ".join(map(str, placed)) or "any device"
        state.notes.append(f"no memory plan for {left} layers: between calls their weights are not on {where}")
    on_gpus = any(device.type == "cuda" for device in placed)
    if not placed or (state.memory == "auto" and not on_gpus):
        return ()
    if on_gpus:
        grow_segments()
    alone = len(placed) == 1
    if not alone:
        _leave_out_recordings(state, placed)
    kept = state.kept if alone and state.precision is None and not any(map(sharded, state.model.parameters())) else None
    made = [
        RuntimePlanner(
            state.memory,
            state.model,
            gauge_of(device),
            device,
            slots,
            state.heads,
            _offload(state, device, len(placed)),
            state.replays if alone else None,
            kept,
        )
        for device, slots in placed.items()
    ]
    for budget in made[1:]:
        budget.menus = made[0].menus  # layers of one kind are surveyed once, wherever they are
    return tuple(made)


def by_device(slots: Sequence[LayerSlot]) -> dict[torch.device, list[LayerSlot]]:
    """Layers whose weights stay somewhere. Where there are GPUs, those on them: a CPU has no bounds to keep."""
    found: dict[torch.device, list[LayerSlot]] = {}
    for slot in slots:
        if (device := slot.device) is not None:
            found.setdefault(device, []).append(slot)
    gpus = {device: members for device, members in found.items() if device.type == "cuda"}
    return gpus or found


def _offload(state: Planned, device: torch.device, devices: int) -> Offload | None:
    """On a CPU there is nowhere else to go."""
    if device.type != "cuda" or state.host_bytes == 0:
        return None
    host = (
        state.host_bytes
        if devices == 1
        else (available() // 2 if state.host_bytes is None else state.host_bytes) // devices
    )
    return Offload(device, host, state.offload_dir)


def _leave_out_recordings(state: Planned, devices: Iterable[torch.device]) -> None:
    """A budget counts their memory on its own device only."""
    for region in state.regions:
        region.replays = None
    if any(device.type == state.replays.recorder.device for device in devices):
        state.replays.failures.append("no CUDA graph: layers are on several devices, each with a budget of its own")
