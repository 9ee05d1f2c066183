"""The bytes of one device: what the user allows, what is there whatever layers do, and what else is known to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar

import torch
from torch import nn

from tunecompile._torch.card import has_bfloat16
from tunecompile.integrations.deepspeed import whole
from tunecompile.integrations.fsdp import Shards
from tunecompile.ops.linear_cross_entropy import workspace
from tunecompile.planner.device_memory import MARGIN, Gauge, Spec, budget_bytes, gradient_bytes, moment_bytes
from tunecompile.planner.hardware import Rates
from tunecompile.planner.step_plan import RegionCandidates, RegionRun, StepRequest
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.memory.graph_allowance import Recordings
from tunecompile.runtime.memory.offload import Offload
from tunecompile.runtime.memory.weight_cache import WeightCache

#: share of the device that CUDA graphs may take beside what checkpoints would need: those of steps that wait for
#: launches are small, and the wait is half of such a step
SPARE = 0.02
#: share of what is free at the first step that checkpointed layers may take, however little their checkpoints need:
#: small batches are left alone. The rest is for what comes between steps, such as a generation
FLOOR = 0.5


class PlannedRegion(Protocol):
    """Layers of one structure: `runtime.layers.region.Region`."""

    name: str


class PlannedLayer(Protocol):
    """The slot of a layer: `runtime.layers.layer_slot.LayerSlot`."""

    layer: nn.Module
    checkpoint: bool  #: whether the user enabled gradient checkpointing
    place: int  #: among all layers of the model
    window: int  #: tokens that its attention sees, by its attributes; 0 for all

    @property
    def region(self) -> PlannedRegion:
        """The region of the layer."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Where its weights are; None where they are elsewhere between calls."""
        ...


class PlannedHead(Protocol):
    """A head whose loss is computed with it."""

    module: nn.Module


@dataclass
class MemoryAccounting:
    """Bytes on one device.

    `layers` are the slots of the model's layers on the device in running order, each with its `region`. `heads` are
    those whose loss is computed with them, each with its `module`.
    """

    spec: Spec  #: the budget, as the user gave it
    model: nn.Module
    gauge: Gauge
    device: torch.device
    layers: Sequence[PlannedLayer]
    heads: Sequence[PlannedHead]
    offload: Offload | None = None
    replays: GraphReplays | None = None
    kept: WeightCache | None = None
    present: int = 0  #: bytes allocated before the step's first layer, without recordings, which layers hold
    surplus: int = 0  #: bytes by which steps exceeded what was predicted
    slack: int = 0  #: bytes the allocator held beside tensors at the peak
    checkpointed: bool = False  #: whether the budget is what checkpoints around all layers would need
    most: int = 0  #: tokens of the largest batch that came, or that may come where that is known
    free: int | None = None  #: bytes that were free before the first layer of all
    ceiling: int | None = None  #: bytes for layers, head and loss that another rank found to be all there is
    failures: int = 0  #: of allocations, that were dealt with

    def __post_init__(self) -> None:
        self.limit = budget_bytes(self.spec, self.gauge)
        self.recordings = Recordings(self.replays, self.device)
        if self.replays is not None and self.offload is not None:
            self.replays.copying = self.offload.spent
        self.shards = Shards()

    def allowed(self) -> int:
        """Bytes that torch's allocator may hold: the budget, or less where others hold a part of it at present."""
        allowed = allowed_bytes(self.limit, self.gauge)
        bounded = self.bounds_all and isinstance(self.limit, int)  # without a number, it is what is available
        return min(allowed, self.gauge.available()) if bounded else allowed

    def begin_layers(self, tokens: int) -> None:
        """Before the first layer of a step on so many tokens."""
        self.recordings.begin(tokens)
        self.present = self.gauge.allocated() - self.recordings.saved
        self.most = max(self.most, tokens)
        self.free = self.allowed() - self.others() if self.free is None else self.free

    def request(
        self, tokens: int, candidates: Mapping[int, RegionCandidates], rates: Rates, all_seen: bool, first: bool
    ) -> StepRequest:
        """What a plan for a batch of so many tokens is made from. first: whether the optimizer has not stepped yet."""
        self.shards = Shards(self.model)
        allowed = self.allowed()
        passing = self.shards.passing([slot.layer for slot in self.layers]) if self.bounds_all else 0
        return StepRequest(
            tokens=tokens,
            runs=region_runs(self.layers, self._coming),
            candidates=candidates,
            rates=rates,
            available=allowed - max(self.slack, int(MARGIN * allowed)),
            resident=self.others() + self._to_come(first) + passing + self.surplus,
            tail=self.tail(tokens),
            summed=summed_bytes(self.model, self.head_weights(), self.shards.graded) if self.bounds_all else 0,
            host=host_bytes(self.offload),
            ceiling=self.ceiling,
            offload=self.offload is not None,
            all_seen=all_seen,
            keeps_weights=self.kept is not None and not self.checkpointed,
            saving=self.recordings.saving(tokens),
            records=self.recordings.made,
            checkpointed=self.checkpointed,
            most=self.most,
            floor=int(FLOOR * (self.free or 0)),
            spare=int(SPARE * self.gauge.total()) if self.checkpointed else 0,
        )

    def others(self) -> int:
        """Bytes in tensors before the step's first layer, without recordings and kept weights, which layers hold.

        Recordings that the step itself made or dropped do not change that.
        """
        return max(0, self.present - (self.kept.bytes if self.kept is not None else 0))

    def tail(self, tokens: int) -> int:
        """Bytes that head and loss need beside what the layers hold."""
        return tail_bytes(self.head_weights(), tokens)

    def _to_come(self, first: bool) -> int:
        """Gradients that are not there yet, and in the first step the optimizer's two moments of each parameter."""
        if not self.bounds_all:
            return 0
        inside = {id(p) for slot in self.layers for p in slot.layer.parameters()}
        beside = [p for p in self.model.parameters() if p.requires_grad and id(p) not in inside and self.is_here(p)]
        moments = moment_bytes(map(self.shards.at_rest, self._trained(self.model))) if first else 0
        return self.shards.to_come(self._ungraded(self.model), beside) + moments

    def _coming(self, layers: Sequence[PlannedLayer]) -> int:
        """Bytes of gradients that each of these layers' backward brings."""
        return min(self.shards.gradient_bytes(self._ungraded(slot.layer)) for slot in layers)

    def _ungraded(self, module: nn.Module) -> list[nn.Parameter]:
        """Trained parameters on this GPU without a gradient yet."""
        return [p for p in self._trained(module) if not self.shards.graded(p)] if self.bounds_all else []

    def _trained(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.requires_grad and self.shards.at_rest(p).device == self.device]

    def trained_here(self) -> list[torch.Tensor]:
        """Trained parameters as they are from step to step, those of this device's budget."""
        at_rest = (self.shards.at_rest(p) for p in self.model.parameters() if p.requires_grad)
        return [parameter for parameter in at_rest if self.is_here(parameter)]

    def head_weights(self) -> list[torch.Tensor]:
        """Weights of the heads here. (A head may be any module.)"""
        return head_weights(self.heads, self.is_here)

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Not on another device of this kind, which has a budget of its own."""
        return tensor.device == self.device or tensor.device.type != self.device.type

    @property
    def bounds_all(self) -> bool:
        """Whether it bounds all that the device holds. (On a CPU it bounds what layers hold.)"""
        return self.device.type == "cuda"

    def overflowed(self) -> bool:
        """Whether allocations failed on the device since this was last asked."""
        before, self.failures = self.failures, self.gauge.failures()
        return self.failures > before

    def host_is_full(self, nbytes: int) -> bool:
        """Whether so many bytes more could not leave the device."""
        blocks = None if self.offload is None else self.offload.blocks
        return blocks is None or (blocks.store.disk is None and blocks.pool.room < nbytes)


def compute_dtype(device: torch.device) -> torch.dtype:
    """In which matrices are multiplied there."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32 if device.type != "cuda" else torch.bfloat16 if has_bfloat16(device) else torch.float16


def allowed_bytes(limit: int | str | None, gauge: Gauge) -> int:
    """Bytes that torch's allocator may hold. limit: what `budget_bytes` made of the user's budget."""
    return limit - gauge.outside() if isinstance(limit, int) else gauge.available()


def host_bytes(offload: Offload | None) -> int | None:
    """Bytes that may leave the device; None for any number."""
    return 0 if offload is None else None if offload.blocks.store.disk is not None else offload.blocks.pool.limit


def head_weights(heads: Iterable[PlannedHead], is_here: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Weights of the heads on a device, whole where several processes share them."""
    found = (getattr(head.module, "weight", None) for head in heads)
    return [whole(weight) for weight in found if weight is not None and is_here(weight)]


def tail_bytes(weights: Iterable[torch.Tensor], tokens: int) -> int:
    """Bytes that heads of these weights and their loss need."""
    return sum(workspace(weight, tokens) for weight in weights)


def summed_bytes(model: nn.Module, heads: Sequence[torch.Tensor], graded: Callable[[nn.Parameter], bool]) -> int:
    """Bytes beside its gradient that a trained weight takes at a backward pass's end, if head and embedding share it.

    Autograd adds both their gradients up before it hands on the sum, out of place: three of them are there at once.

    Args:
        model: whose modules may share a head's weight.
        heads: the heads' weights.
        graded: whether a parameter's gradient is there before the backward pass, which adds to it.
    """
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    return sum(
        gradient_bytes([weight]) * (3 if graded(weight) else 2)
        for weight in {id(weight): weight for weight in heads}.values()
        if isinstance(weight, nn.Parameter) and weight.requires_grad and uses[id(weight)] > 1
    )


L = TypeVar("L", bound=PlannedLayer)


def region_runs(layers: Sequence[L], gradients: Callable[[list[L]], int]) -> tuple[RegionRun, ...]:
    """Layers of one region and one window make a run. gradients: bytes that each of a run's layers' backward brings."""
    grouped = ((key, list(run)) for key, run in groupby(layers, key=lambda slot: (id(slot.region), slot.window)))
    return tuple(RegionRun(region, len(run), window, gradients(run)) for (region, window), run in grouped)
