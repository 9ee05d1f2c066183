"""One budget for each device of a model's layers (`device_map`): devices run in turn, each with its own memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tunecompile._torch.cuda import grow_segments
from tunecompile._torch.distributed import sharded
from tunecompile.notes import Note, note
from tunecompile.planner.device_memory import Spec, gauge_of
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.memory.accounting import MemoryAccounting, PlannedHead, PlannedLayer
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.host.pinned_pool import available
from tunecompile.runtime.memory.offload import Offload
from tunecompile.runtime.memory.weight_cache import WeightCache


class Recorded(Protocol):
    """A kind of layers: `runtime.layers.region.Region`."""

    replays: GraphReplays | None


class Planned(Protocol):
    """The part of a model's state that decides how much memory its layers may take."""

    model: nn.Module
    memory: Spec
    checkpointed: bool
    settings: Any  #: `runtime.model_state.Settings`
    precision: str | None
    slots: Sequence[PlannedLayer]
    heads: Sequence[PlannedHead]
    regions: Sequence[Recorded]
    replays: GraphReplays
    kept: WeightCache
    notes: list[Note]


def make_budgets(state: Planned) -> tuple[RuntimePlanner, ...]:
    """Planners by `memory=`: the same budget for each device, and host memory in equal shares.

    Empty where none can plan.
    """
    placed = by_device(state.slots)
    if left := len(state.slots) - sum(map(len, placed.values())):
        where = " or ".join(map(str, placed)) or "any device"
        reason = note("weights-not-on-device", where)
        state.notes.append(note("no-memory-plan", f"{left} layers", reason))
    on_gpus = any(device.type == "cuda" for device in placed)
    if not placed or (state.memory == "auto" and not on_gpus and not state.checkpointed):
        return ()
    if on_gpus:
        grow_segments()
    alone = len(placed) == 1
    if not alone:
        _leave_out_recordings(state, placed)
    kept = state.kept if alone and state.precision is None and not any(map(sharded, state.model.parameters())) else None
    made = [
        RuntimePlanner(
            MemoryAccounting(
                state.memory,
                state.model,
                gauge_of(device),
                device,
                slots,
                state.heads,
                _offload(state, device, len(placed)),
                state.replays if alone else None,
                kept,
                checkpointed=state.checkpointed,
            )
        )
        for device, slots in placed.items()
    ]
    for budget in made[1:]:  # layers of one kind are surveyed once, wherever they are
        budget.surveys.candidates = made[0].surveys.candidates
    return tuple(made)


def by_device(slots: Sequence[PlannedLayer]) -> dict[torch.device, list[PlannedLayer]]:
    """Layers by the device of their weights. Where there are GPUs, only those on them: a CPU has no budget to keep."""
    found: dict[torch.device, list[PlannedLayer]] = {}
    for slot in slots:
        if (device := slot.device) is not None:
            found.setdefault(device, []).append(slot)
    gpus = {device: members for device, members in found.items() if device.type == "cuda"}
    return gpus or found


def _offload(state: Planned, device: torch.device, devices: int) -> Offload | None:
    """The offloading of one device; None on a CPU, and where no host memory may be taken."""
    given = state.settings.host_bytes
    if device.type != "cuda" or given == 0:
        return None
    host = given if devices == 1 else (available() // 2 if given is None else given) // devices
    return Offload(device, host, state.settings.offload_dir)


def _leave_out_recordings(state: Planned, devices: Iterable[torch.device]) -> None:
    """Record no CUDA graphs: a budget would count their memory on its own device only."""
    for region in state.regions:
        region.replays = None
    if any(device.type == state.replays.recorder.device for device in devices):
        state.replays.failures.append(note("no-cuda-graph", detail=note("budgets-of-several-devices")))
