"""The plan of a step that will not run, solved from the bytes that the model alone would hold on its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from tunecompile._torch.fake_tensors import size_hint
from tunecompile.compiler.partitioner import JointGraph
from tunecompile.compiler.survey import survey
from tunecompile.compiler.token_wise.graph import is_recurrence
from tunecompile.errors import BadSharedPrefix
from tunecompile.ir.canonicalize import name_of
from tunecompile.ir.op import OPS
from tunecompile.notes import Note, note
from tunecompile.planner import candidates
from tunecompile.planner.cost_model import Work, beside_layers, is_attention
from tunecompile.planner.datasheets import GpuSpec, rates_of
from tunecompile.planner.device_memory import MARGIN, Gauge, Spec, budget_bytes, gradient_bytes
from tunecompile.planner.hardware import Rates
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan, PlanOption, choose
from tunecompile.planner.step_plan import AdmittedPlan, RegionCandidates, StepRequest, count_options, solve
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.memory.accounting import (
    allowed_bytes,
    compute_dtype,
    head_weights,
    host_bytes,
    region_runs,
    summed_bytes,
    tail_bytes,
)
from tunecompile.runtime.memory.offload import Offload
from tunecompile.runtime.unpad.prefixes.forest import GAIN, SHORTEST


@dataclass(frozen=True)
class StaticMemory:
    """A gauge of the bytes that the model alone would hold on its device, once its optimizer has stepped."""

    weights: int
    gradients: int
    optimizer: int
    device: Gauge
    sharded: bool = False  #: whether layers are gathered for every call, so that nothing of them can be kept
    spread: bool = False  #: whether layers are on several devices
    growing: float = (
        0.0  #: share of a layer's gradients that comes with its backward and stays, and is not there before
    )

    @property
    def keeps(self) -> bool:
        """Whether frozen 4-bit weights may stay dequantised."""
        return not (self.sharded or self.spread)

    def allocated(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def peak(self) -> tuple[int, int]:
        return 0, 0

    def release(self) -> None:
        pass

    def forget_peak(self) -> None:
        pass

    def failures(self) -> int:
        return 0

    def outside(self) -> int:
        return self.device.outside()

    def available(self) -> int:
        return self.device.available()

    def total(self) -> int:
        return self.device.total()


@dataclass(frozen=True)
class SharedPrefix:
    """Tokens that all rows of a batch begin with, which layers compute once.

    Raises:
        BadSharedPrefix: rows are not longer, or it is negative.
    """

    tokens: int = 0  #: of the prefix
    length: int = 1  #: of a row

    def __post_init__(self) -> None:
        if not 0 <= self.tokens < self.length:
            raise BadSharedPrefix(given=self.tokens, length=self.length)

    def computed(self, tokens: int) -> int:
        """Of a batch of so many tokens, those that layers compute."""
        once = tokens - self.tokens * max(0, tokens // self.length - 1)
        return once if self.tokens >= SHORTEST and tokens >= GAIN * once else tokens


@dataclass
class DryRunPlanner:
    """The plan of a step that will not run.

    Each kind of layers is surveyed; the ledger has all bytes that the model holds.
    """

    spec: Spec
    model: nn.Module
    ledger: StaticMemory
    device: torch.device
    layers: Sequence[LayerSlot]
    heads: Sequence[Any]
    offload: Offload | None = None
    gpu: GpuSpec | None = None  #: to plan for in the place of the model's device
    bounded: bool = True  #: whether there is a budget to plan for
    keepable: bool = False  #: whether 4-bit weights would stay dequantised in a step, where the ledger says so, too
    prefix: SharedPrefix = SharedPrefix()
    thorough: bool = False  #: whether every plan is surveyed, though some fit: others may fit another batch
    candidates: dict[int, RegionCandidates] = field(default_factory=dict)  #: by region
    tokens: int = 0  #: of the batch's rows
    admitted: AdmittedPlan | None = None
    attends: bool = False  #: whether any layer's attention is fused
    masks: dict[Any, int] = field(default_factory=dict)  #: bytes of masks that layers read, by what shares memory
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limit = budget_bytes(self.spec, self.ledger)
        self.kept = self.keepable and self.ledger.keeps

    @property
    def plan(self) -> AdmittedPlan:
        """The plan, once a kind of layers was surveyed."""
        assert self.admitted is not None
        return self.admitted

    def allowed(self) -> int:
        """Bytes that torch's allocator may hold."""
        return allowed_bytes(self.limit, self.ledger)

    def tail(self, tokens: int) -> int:
        """Bytes that head and loss need."""
        return tail_bytes(self._head_weights(), tokens)

    def host_bytes(self) -> int | None:
        """That may leave the device; None for any number."""
        return host_bytes(self.offload)

    def see(self, slot: LayerSlot, joint: JointGraph) -> None:
        """Survey a layer's graph, and plan for all layers."""
        self.attends = self.attends or any(
            node.op == "call_function" and "attention" in str(node.target) for node in joint.graph.nodes
        )
        if self.prefix.tokens and (why := _why_kept(slot, joint.graph)) is not None:
            self.prefix = SharedPrefix()
            self.notes.append(why)
        region = id(slot.region)
        joint = joint if self.gpu is None else replace(joint, attention=_attention(joint.graph, self.gpu))
        result = survey(joint, self.tokens, self._stages(joint.graph), partial(self._is_enough, region), self.kept)
        if result.error is not None:
            missing = "no-memory-plan" if result.found is None else "few-memory-plans"
            reason = f"{type(result.error).__name__}: {str(result.error)[:200]}"
            self.notes.append(note(missing, slot.region.name, reason))
        if result.found is not None:
            self.candidates[region] = result.found
            self.admitted = solve(self.request(self.tokens))

    def _stages(self, graph: Graph) -> Iterable[list[Plan]]:
        """Plans to survey.

        Of several regions all plans that are not tiled make one stage, since the bytes of the others are not known yet.
        """
        if not self.bounded:
            return [[KEEP, RECOMPUTE]]
        stages = candidates.candidate_stages(graph)
        alone = len({id(slot.region) for slot in self.layers}) == 1
        return stages if alone else chain([candidates.plans(graph)], islice(stages, 2, None))

    def _is_enough(self, region: int, found: RegionCandidates) -> bool:
        """Whether the candidates found of a region so far are enough."""
        known = {**self.candidates, region: found}
        made = solve(replace(self.request(self.tokens), candidates=known, all_seen=self._all_seen(known)))
        return not self.thorough and made.settles(known.values())

    def _all_seen(self, known: Mapping[int, RegionCandidates]) -> bool:
        return all(id(slot.region) in known for slot in self.layers)

    def request(self, tokens: int) -> StepRequest:
        """Layers and bytes that the plan of a batch is solved from."""
        allowed = self.allowed()
        runs = region_runs(self.layers, self._coming)
        if not self.bounded:  # layers do what the user's checkpointing says
            first = {id(slot.region): slot for slot in reversed(self.layers)}
            runs = tuple(replace(run, only=RECOMPUTE if first[run.region].checkpoint else KEEP) for run in runs)
        return StepRequest(
            tokens=self.prefix.computed(tokens),
            runs=runs,
            candidates=self.candidates,
            rates=self.rates(),
            available=allowed - int(MARGIN * allowed),
            resident=self.ledger.allocated() + sum(self.masks.values()),
            tail=self.tail(tokens),
            summed=summed_bytes(self.model, self._head_weights(), lambda weight: False),
            host=self.host_bytes(),
            offload=self.offload is not None,
            all_seen=self._all_seen(self.candidates),
            keeps_weights=self.kept,
            records=True,  # a step leaves room for CUDA graphs first, of which a dry run has none
        )

    def _coming(self, layers: Sequence[LayerSlot]) -> int:
        """Bytes of gradients that each of these layers' backward brings."""
        trained = ([p for p in slot.layer.parameters() if p.requires_grad] for slot in layers)
        return int(self.ledger.growing * min(map(gradient_bytes, trained)))

    def _head_weights(self) -> list[Tensor]:
        return head_weights(
            self.heads, lambda weight: weight.device.type != self.device.type or weight.device == self.device
        )

    def rates(self) -> Rates:
        """Rates of the GPU to plan for, or measured on the model's device."""
        return self.gpu.rates if self.gpu is not None else rates_of(self.device, compute_dtype(self.device))

    def most_tokens(self) -> int:
        """The largest batch that fits. Bytes are taken to follow tokens."""
        low, high = 0, self.tokens
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.holds(middle) else (low, middle)
        return low

    def holds(self, tokens: int) -> bool:
        """Whether such a batch would fit, by the plans that were surveyed."""
        request = self.request(tokens)
        runs, room = request.layer_runs(), self.plan.room
        return request.last(runs) <= room and choose(runs, room, request.tail, request.host).fits

    def options_for(self, tokens: int) -> tuple[PlanOption, ...]:
        """The options of the first kind of layer."""
        return self.request(tokens).layer_runs()[0].options

    def under(self, ledger: StaticMemory) -> bool:
        """Plan anew for a device that holds other bytes.

        Returns whether all plans that this takes were surveyed, of the same graphs.
        """
        if not self.kept and self.keepable and ledger.keeps:
            return False
        self.ledger, self.kept = ledger, self.keepable and ledger.keeps
        made = self.admitted = solve(self.request(self.tokens))
        surveyed = self.candidates.values()
        enough = not self.thorough and made.settles(surveyed)
        return not self.bounded or enough or all(found.whole for found in surveyed)

    def step_ms(self) -> float | None:
        """Predicted milliseconds of a step, with AdamW and without data loading; None for no GPU."""
        speed = self.rates()
        return self.plan.choice.work + self._beside_layers().ms(speed) if speed.launches else None

    def optimizer_ms(self) -> float:
        """Milliseconds of AdamW."""
        return beside_layers([], self._trained(), self.tokens).ms(self.rates())

    def forward_ms(self) -> float:
        """Milliseconds of all layers' forwards under the plan, without what waits for copies."""
        request = self.request(self.tokens)
        chosen = (replace(option.plan, weights=False) for run in self.plan.choice.options for option in run)
        return sum(
            next(row for row in each.rows if row.plan.key == plan.key).forward_work.ms(
                each.rates(request.rates), request.tokens / each.tokens
            )
            for each, plan in zip(request.layers(), chosen)
        )

    def flops(self) -> int:
        """Floating point operations of all layers' forward and backward, nothing recomputed, and of the heads."""
        total, request = 0.0, self.request(self.tokens)
        for each in request.layers():
            kept = next(row for row in each.rows if row.plan == KEEP)
            total += (kept.forward_work.flops + kept.backward_work.flops) * request.tokens / each.tokens
        return int(total) + self._beside_layers().flops

    def _beside_layers(self) -> Work:
        return beside_layers(self._head_weights(), self._trained(), self.tokens)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def plans_by_layer(self) -> list[dict[str, Any]]:
        """How many layers follow each plan."""
        chosen = (option for options in self.plan.choice.options for option in options)
        return count_options(
            (option, self.candidates[id(slot.region)].names)
            for slot, option in zip(self.layers, chosen)
            if id(slot.region) in self.candidates
        )

    def count_options(self, options: Iterable[PlanOption]) -> list[dict[str, Any]]:
        """How many of other layers, of the first kind, follow each of these options."""
        found = self.candidates.get(id(self.layers[0].region))
        return count_options((option, found.names if found is not None else ()) for option in options)


def _why_kept(slot: LayerSlot, graph: Graph) -> Note | None:
    """Why a prefix is counted in each row of layers of a kind; None where it is counted once."""
    if (states := next((node for node in graph.nodes if is_recurrence(node.target)), None)) is not None:
        return note("prefix-uncounted", detail=name_of(states.target))
    drawing = (module for module in slot.layer.modules() if isinstance(module, nn.Dropout) and module.p)
    drawn = note("draws-random", detail="dropout")
    return None if next(drawing, None) is None else note("prefixes-kept", detail=drawn)


def _attention(graph: Graph, gpu: GpuSpec) -> float | None:
    """Floating point operations a millisecond of the longest call of attention; None without any."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and is_attention(node)]
    sizes = [(_row(node), size_hint(node.all_input_nodes[0].meta["val"].shape[-1])) for node in nodes]
    return gpu.attention(*max(sizes)) if sizes else None


def _row(node: Node) -> int:
    """Tokens of a row: of [B, H, T, D], or of the longest document where documents are one row, [N, H, D]."""
    like, op = node.all_input_nodes[0].meta["val"], OPS.get(node.target)
    if like.dim() != 3 or op is None or "longest" not in op.parameters:
        return size_hint(like.shape[-2])
    longest = node.args[op.parameters.index("longest")]
    return size_hint(longest.meta["val"] if isinstance(longest, Node) else longest)
