"""A training step that is not run: a skeleton of the model, new modules around the same parameters, is called on fake tensors, which have shapes and
no memory. Its layers are traced as in a training step, by the same passes and the same `RuntimePlanner`; in place of code come blank results.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_map_only

from tunecompile._torch.dynamo import static_shapes
from tunecompile._torch.fake_tensors import FakeTensorMode, size_hint
from tunecompile._torch.modules import fill
from tunecompile.compiler.backend import Backend
from tunecompile.compiler.partitioner import Decide
from tunecompile.compiler.weight_layout import growth, matrix_bytes
from tunecompile.errors import CannotEstimate, summary
from tunecompile.estimate.meta_nf4 import counted_tensors, meta_linears
from tunecompile.ir.op import has_triton
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.notes import Note, note
from tunecompile.planner import candidates
from tunecompile.planner.cost_model import beside_layers, is_attention
from tunecompile.planner.datasheets import HOST, GpuSpec
from tunecompile.planner.device_memory import Gauge
from tunecompile.planner.hardware import Rates
from tunecompile.planner.solver import KEEP, RECOMPUTE, Assignment, LayerRun, Plan, PlanOption, choose
from tunecompile.runtime.dynamic_shapes import DynamicShapes, tensors_in
from tunecompile.runtime.layer_slot import LayerSlot
from tunecompile.runtime.memory.budget import RegionCandidates, RuntimePlanner
from tunecompile.runtime.memory.graph_allowance import RECORDED
from tunecompile.runtime.memory.offload import Offload
from tunecompile.runtime.memory.oom_recovery import sharded
from tunecompile.runtime.memory.weight_cache import WeightCache
from tunecompile.runtime.model_state import State
from tunecompile.runtime.region import Region
from tunecompile.runtime.variant import Variant

UNBOUNDED = 1 << 60  #: bytes


@dataclass(frozen=True)
class StaticMemory:
    """A gauge of what the model alone would hold on its device, once its optimizer has made a step."""

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
    def moves(self) -> bool:
        """Whether frozen weights may stand in matrices with their adapters: dense ones moved there, others dequantised."""
        return not (self.sharded or self.spread)

    def allocated(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def peak(self) -> tuple[int, int]:
        return 0, 0

    def release(self) -> None:
        pass

    def outside(self) -> int:
        return self.device.outside()

    def available(self) -> int:
        return self.device.available()

    def total(self) -> int:
        return self.device.total()


@dataclass
class DryRunPlanner(RuntimePlanner):
    """A budget for a step that will not run. All kinds of layers are surveyed; all that the model holds is in the gauge."""

    bounded: bool = True  #: whether there is a budget to plan for
    attends: bool = False  #: whether any layer's attention is fused
    gpu: GpuSpec | None = None  #: that is not there, but in the place of the model's device
    movable: bool = False  #: whether frozen dense weights would move in a step, where the gauge says that they may
    keepable: bool = False  #: whether other frozen weights would stay dequantised, likewise
    thorough: bool = False  #: whether every plan is surveyed, though some fits: for what would fit another batch

    @property
    def moves(self) -> bool:
        return self.movable and self.gauge.moves

    def decide(self, graph: Graph, cut: candidates.Cut, attention: float | None = None) -> Plan:
        attention = attention if self.gpu is None else _attention(graph, self.gpu)
        self.attends = self.attends or any(
            node.op == "call_function" and "attention" in str(node.target) for node in graph.nodes
        )
        if self.bounded and len({id(slot.region) for slot in self.layers}) == 1:
            return super().decide(graph, cut, attention)
        plans = candidates.plans(graph) if self.bounded else [KEEP, RECOMPUTE]
        weights = matrix_bytes(graph) if self.kept is not None else 0
        self.moving[id(self.running.region)] = growth(graph) if self.moves else 0
        self.menus[id(self.running.region)] = RegionCandidates(
            tuple(candidates.survey(cut, plans)),
            self.tokens,
            tuple(map(candidates.describe, candidates.expensive_nodes(graph))),
            weights,
            attention=attention,
        )
        self._admit(self.tokens)
        return self.options[id(self.running)].plan

    def most_tokens(self) -> int:
        """The largest batch that fits. Bytes are taken to follow tokens."""
        low, high = 0, self.admitted.tokens
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.holds(middle) else (low, middle)
        return low

    def holds(self, tokens: int) -> bool:
        """Whether such a batch would fit, by the plans that were surveyed."""
        return choose(self._stacks(tokens)[0], self.admitted.room, self.tail(tokens), self.host_bytes()).fits

    def options_for(self, tokens: int) -> tuple[PlanOption, ...]:
        """What the first kind of layer may choose from."""
        return self._stacks(tokens)[0][0].options

    def under(self, ledger: StaticMemory) -> bool:
        """Plan anew for a device that holds something else. Whether all plans that this needs were surveyed, of graphs as it runs them."""
        if self.moves != (self.movable and ledger.moves) or (self.kept is None and self.keepable and ledger.moves):
            return False
        self.gauge, self.present = ledger, ledger.allocated()
        self.kept = WeightCache() if self.keepable and ledger.moves else None
        self._admit(self.tokens)
        return not self.bounded or self._satisfied() or all(found.whole for found in self.menus.values())

    def optimizer_ms(self) -> float:
        """Milliseconds of AdamW."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return beside_layers([], trained, self.tokens).ms(self.speed)

    def forward_ms(self) -> float:
        """Milliseconds of all layers' forwards under the plan, without what waits for copies."""
        options = [option for options in self.admitted.choice.options for option in options]
        found = [
            next(row for row in each.rows if row.plan.key == replace(option.plan, weights=False).key)
            for each, option in zip(self._layers_menus(), options)
        ]
        return sum(
            row.forward_work.ms(self._rates_of(each), self.tokens / each.tokens)
            for each, row in zip(self._layers_menus(), found)
        )

    def flops(self) -> int:
        """Of all layers' forward and backward, nothing computed again, and of the heads."""
        kept = [
            (next(row for row in each.rows if row.plan == KEEP), self.tokens / each.tokens)
            for each in self._layers_menus()
        ]
        return (
            int(sum((row.forward_work.flops + row.backward_work.flops) * scale for row, scale in kept))
            + self._beside_layers(self.tokens).flops
        )

    def _stacks(self, tokens: int) -> tuple[list[LayerRun], list[list[Any]]]:
        stacks, slots = super()._stacks(tokens)
        if not self.bounded:  # layers do what the user's checkpointing says
            wanted = [RECOMPUTE if layers[0].checkpoint else KEEP for layers in slots]
            stacks = [
                replace(stack, options=tuple(o for o in stack.options if o.plan == plan))
                for stack, plan in zip(stacks, wanted)
            ]
        return stacks, slots

    def _satisfied(self) -> bool:
        return not self.thorough and super()._satisfied()

    def _rates(self) -> Rates:
        return super()._rates() if self.gpu is None else self.gpu.rates

    def _keep_weights(self, choice: Assignment, slots: list[list[Any]], left: int) -> tuple[Assignment, int]:
        """A step leaves room for CUDA graphs first, of which a rehearsal has none."""
        return super()._keep_weights(choice, slots, left - int((RECORDED - 1) * choice.peak))

    def _to_come(self) -> int:
        return 0

    def _coming(self, layers: Sequence[Any]) -> int:
        return int(self.gauge.growing * super()._coming(layers))

    def _ungraded(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.requires_grad]


def _attention(graph: Graph, gpu: GpuSpec) -> float | None:
    """Operations a millisecond of the longest call; None without any."""
    sizes = [
        [size_hint(n) for n in source.meta["val"].shape[-2:]]
        for node in graph.nodes
        if node.op == "call_function" and is_attention(node)
        for source in node.all_input_nodes[:1]
    ]
    return gpu.attention(*max(sizes)) if sizes else None


class TraceOnlyBackend(Backend):
    """Sees a layer's graph as a training step's backend would. What it returns computes nothing: results are blank."""

    attends = False  #: whether the layer calls attention by its name

    def __init__(self, region: Region, plan: Plan | None, decide: Decide | None, fakes: FakeTensorMode, moves: bool):
        super().__init__(
            region.name,
            region.passes,
            "eager",
            plan,
            precision=region.precision,
            decide=decide,
            kept=WeightCache(moves=True) if moves else None,
        )
        self.fakes = fakes

    def __call__(self, gm: GraphModule, inputs: list) -> Callable:
        self.attends = self.attends or any(node.target is F.scaled_dot_product_attention for node in gm.graph.nodes)
        super().__call__(gm, inputs)
        (returned,) = (node for node in gm.graph.nodes if node.op == "output")
        like, fakes = torch.fx.map_arg(returned.args[0], lambda node: node.meta["example_value"]), self.fakes
        return lambda *_: _blank(like, fakes)  # Dynamo keeps this for longer than the model may live


def _blank(like: Any, fakes: FakeTensorMode) -> Any:
    """Tensors of the same shapes."""

    def blank(tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
        )

    with fakes:
        return tree_map_only(Tensor, blank, like)


class TraceOnlySlot:
    """What stands in the `_compiled_call_impl` of a skeleton's layer: the first of each kind is traced, the others return alike."""

    def __init__(
        self,
        slot: LayerSlot,
        budget: RuntimePlanner,
        fakes: FakeTensorMode,
        seen: dict[tuple, tuple[TraceOnlyBackend, Any]],
    ):
        self.slot, self.budget, self.fakes, self.seen = slot, budget, fakes, seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, _ = self.slot.differentiable(args, kwargs)
        region, sizes = self.slot.region, DynamicShapes.of(list(tensors_in(args, kwargs)))
        self.budget.option(self.slot, math.prod(sizes))
        glimpse, output = self.seen.get((id(region), sizes), (None, None))
        if glimpse is not None and id(region) in self.budget.menus:
            return _blank(output, self.fakes)
        known = id(region) in self.budget.menus  # if not: nothing in the layers before was trained
        glimpse = TraceOnlyBackend(
            region, KEEP if known else None, None if known else self.budget.decide, self.fakes, self.budget.moves
        )
        variant = Variant(region.name, glimpse)  # Dynamo holds it weakly
        output = variant.call(self.slot.layer, *args, **kwargs)
        self.seen[id(region), sizes] = glimpse, output
        return output

    def note_eager(self) -> None:
        raise RuntimeError("Dynamo cannot trace it")


def _skeleton(model: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """The same modules and buffers anew, around the same parameters; on the meta device, around fakes of CPU tensors."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    stands = meta_linears(model)
    for tensor in counted_tensors(model, stands):
        if tensor.is_meta and type(tensor) not in (Tensor, nn.Parameter):
            raise CannotEstimate(
                model=type(model).__name__, reason=f"a {type(tensor).__name__} on the meta device is not quantised yet"
            )
        if tensor.is_meta:
            with fakes:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                memo[id(tensor)] = (
                    nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                )
    try:
        memo |= {key: copy.deepcopy(module, memo) for key, module in stands.items()}
        return copy.deepcopy(model, memo).train()
    except Exception as error:
        raise CannotEstimate(
            model=type(model).__name__, reason=f"its modules cannot be copied: {summary(error)}"
        ) from error


def rehearse(
    stage: State,
    ledger: StaticMemory,
    device: torch.device,
    shape: Sequence[int],
    gpu: GpuSpec | None = None,
    thorough: bool = False,
) -> tuple[DryRunPlanner, list[Note]]:
    """Call a skeleton on a blank batch, with all that `optimize` attaches. Returns what was found out, and what to know about it.

    Raises:
        CannotEstimate: the model cannot be copied, called or traced.
    """
    fakes, name, spec = FakeTensorMode(allow_non_fake_inputs=True), type(stage.model).__name__, stage.memory
    stage.model, stage.memory = _skeleton(stage.model, fakes), None  # the step's budget is the rehearsal
    stage.attach()
    cuda = device.type == "cuda"
    device = device if cuda else torch.device("cpu")
    rehearsal = _budget(stage, spec, ledger, device, gpu, thorough)
    stage.step.budgets = (rehearsal,)
    seen: dict[tuple, tuple[TraceOnlyBackend, Any]] = {}
    for slot in stage.slots:
        fill(slot.layer, TraceOnlySlot(slot, rehearsal, fakes, seen))
    for slot in stage.norms:
        fill(slot.layer, None)
    failure: Exception | None = None
    with fakes:
        ids = torch.empty(tuple(shape), dtype=torch.int64, device=device)
    try:
        with (
            torch.enable_grad(),
            torch.random.fork_rng([device] if cuda else []),
            static_shapes(),
            contextlib.nullcontext() if gpu is None else as_on_gpu(),
        ):
            stage.model(
                ids
            )  # outside the fakes' mode: positions are real numbers, and tell the model that nothing needs a dense mask
    except Exception as error:  # of what comes behind the layers, perhaps
        failure = error
    said = [*rehearsal.notes, *(said for glimpse, _ in seen.values() for said in glimpse.failures)]
    left = list(
        {id(slot.region): slot.region.name for slot in stage.slots if id(slot.region) not in rehearsal.menus}.values()
    )
    if rehearsal.admitted is None or (left and failure is not None):
        reasons = said or [summary(failure) if failure else "the model calls no layer that is trained"]
        raise CannotEstimate(model=name, reason=reasons[0]) from failure
    unfused = any(glimpse.attends for glimpse, _ in seen.values()) and not rehearsal.attends
    absent = []
    if not cuda and (gpu is None or not has_triton()):
        absent = [note("traced-on-cpu" if gpu is None else "estimated-without-triton")]
    return rehearsal, [
        *said,
        *(note("region-not-called", region) for region in left),
        *([note("attention-not-fused")] if unfused else []),
        *absent,
    ]


def _budget(
    stage: State, spec: Any, ledger: StaticMemory, device: torch.device, gpu: GpuSpec | None, thorough: bool
) -> DryRunPlanner:
    """As `optimize` would make it; without a spec, one that bounds nothing but says what there is."""
    bounded, somewhere = spec is not None, device.type == "cuda" or gpu is not None
    host = HOST if stage.host_bytes is None and gpu is not None else stage.host_bytes
    offload = Offload(device, host, stage.offload_dir) if somewhere and bounded and host != 0 else None
    keepable = somewhere and bounded and stage.precision is None
    kept = WeightCache() if keepable and ledger.moves else None
    parameters = [parameter for slot in stage.slots for parameter in slot.layer.parameters()]
    movable = (
        somewhere
        and stage.precision is None
        and not any(map(sharded, parameters))
        and any(p.is_floating_point() and p.dim() == 2 and not p.requires_grad for p in parameters)
    )
    return DryRunPlanner(
        spec if bounded else "auto" if somewhere else UNBOUNDED,
        stage.model,
        ledger,
        device,
        stage.slots,
        stage.heads,
        offload,
        kept=kept,
        bounded=bounded,
        gpu=gpu,
        movable=movable,
        keepable=keepable,
        thorough=thorough,
    )
