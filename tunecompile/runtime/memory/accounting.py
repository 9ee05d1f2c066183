"""What there is for a model's layers on one device: what the user allows, less what is there anyway, and what else is known to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tunecompile.integrations.deepspeed import whole
from tunecompile.integrations.fsdp import Shards
from tunecompile.ops.linear_cross_entropy import workspace
from tunecompile.planner.device_memory import MARGIN, Gauge, Spec, budget_bytes, moment_bytes
from tunecompile.planner.solver import LayerRun
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.memory.graph_allowance import Recordings
from tunecompile.runtime.memory.offload import Offload
from tunecompile.runtime.memory.weight_cache import WeightCache


@dataclass
class MemoryAccounting:
    """Bytes on one device.

    `layers` are the slots of the model's layers there in running order, each with its `region`; `heads` those whose loss is computed with them, each with its `module`.
    """

    spec: Spec
    model: nn.Module
    gauge: Gauge
    device: torch.device
    layers: Sequence[Any]
    heads: Sequence[Any]
    offload: Offload | None = None
    replays: GraphReplays | None = None
    kept: WeightCache | None = None
    present: int = 0  #: bytes allocated before the step's first layer
    moving: dict[int, int] = field(
        default_factory=dict
    )  #: by region, bytes that its dense weights take more from this step on
    surplus: int = 0  #: bytes by which steps exceeded what was predicted
    slack: int = 0  #: bytes the allocator held beside tensors at the peak
    ceiling: int | None = None  #: bytes for layers, head and loss that another rank found to be all there is
    failures: int = 0  #: of allocations, that were dealt with
    steps: int = 0

    def __post_init__(self) -> None:
        self.limit = budget_bytes(self.spec, self.gauge)
        self.recordings = Recordings(self.replays, self.device)
        self.shards = Shards()

    def allowed(self) -> int:
        """Bytes that torch's allocator may hold."""
        if self.limit == "auto":
            return self.gauge.available()
        return self.limit - self.gauge.outside()

    def within(self) -> int:
        """Bytes that would have been the right budget, as far as steps have shown."""
        return max(0, self.allowed() - self.surplus)

    def _own_room(self, resident: int) -> int:
        """Bytes for layers, head and loss, beside so many."""
        return self.allowed() - max(self.slack, int(MARGIN * self.allowed())) - resident

    def _room(self, resident: int) -> int:
        return self._own_room(resident) if self.ceiling is None else min(self._own_room(resident), self.ceiling)

    def _resident(self, stacks: Sequence[LayerRun]) -> int:
        """Bytes that are there whatever layers do."""
        passing = self.shards.passing([slot.layer for slot in self.layers]) if self.bounds_all else 0
        return (
            self.others()
            + self._to_come()
            + passing
            - sum(stack.layers * stack.options[0].gradients for stack in stacks)
            + self.surplus
        )

    def others(self) -> int:
        """Bytes in tensors before the step's first layer, beside what layers hold from step to step: recordings, weights."""
        moving = sum(self.moving.get(id(slot.region), 0) for slot in self.layers)
        return max(0, self.present + moving - self.recordings.bytes - (self.kept.bytes if self.kept is not None else 0))

    def tail(self, tokens: int) -> int:
        """Bytes that head and loss need beside what the layers hold."""
        return sum(workspace(weight, tokens) for weight in self._heads())

    def _to_come(self) -> int:
        """Gradients that are not there yet, and in the first step the optimizer's two moments of each parameter."""
        inside = {id(p) for slot in self.layers for p in slot.layer.parameters()}
        beside = (
            [p for p in self.model.parameters() if p.requires_grad and id(p) not in inside and self._is_here(p)]
            if self.bounds_all
            else []
        )
        moments = (
            moment_bytes(map(self.shards.at_rest, self._trained(self.model)))
            if self.steps == 1 and self.bounds_all
            else 0
        )
        return self.shards.to_come(self._ungraded(self.model), beside) + moments

    def _coming(self, layers: Sequence[Any]) -> int:
        """Bytes of gradients that each of these layers' backward brings."""
        return min(self.shards.gradient_bytes(self._ungraded(slot.layer)) for slot in layers)

    def _ungraded(self, module: nn.Module) -> list[nn.Parameter]:
        """Trained parameters on this GPU without a gradient yet."""
        return [p for p in self._trained(module) if not self.shards.graded(p)] if self.bounds_all else []

    def _trained(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.requires_grad and self.shards.at_rest(p).device == self.device]

    def _heads(self) -> list[torch.Tensor]:
        """Weights of the heads here. (A head may be any module.)"""
        return [
            whole(weight)
            for head in self.heads
            if (weight := getattr(head.module, "weight", None)) is not None and self._is_here(weight)
        ]

    def _is_here(self, tensor: torch.Tensor) -> bool:
        """Not on another device of this kind, which has a budget of its own."""
        return tensor.device == self.device or tensor.device.type != self.device.type

    @property
    def bounds_all(self) -> bool:
        """Whether it bounds all that the device holds. (On a CPU it bounds what layers hold.)"""
        return self.device.type == "cuda"

    @property
    def moves(self) -> bool:
        """Whether dense weights move into matrices with their adapters."""
        return self.kept is not None and bool(self.kept.moves)

    def overflowed(self) -> bool:
        """Whether allocations failed on the device since this was last asked."""
        before, self.failures = self.failures, self.gauge.failures()
        return self.failures > before

    def host_bytes(self) -> int | None:
        """That may leave the device; None for any number."""
        return 0 if self.offload is None else None if self.offload.store.disk is not None else self.offload.pool.limit

    def host_is_full(self, nbytes: int) -> bool:
        """Whether so many bytes more could not leave the device."""
        return self.offload is None or (self.offload.store.disk is None and self.offload.pool.room < nbytes)
