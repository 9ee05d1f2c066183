"""`estimate`: whether a batch will fit, and how long its step takes, without running one.

A skeleton of the model, new modules around the same parameters, is called on fake tensors, which have shapes and no memory. Its layers are
traced as in a training step, by the same passes and the same `Budget`; in place of code come blank results. The model itself is only read.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_map_only

from tunecompile._torch import FakeTensorMode
from tunecompile.api import ATTRIBUTE, State
from tunecompile.backend import Backend
from tunecompile.errors import BadBatchShape, CannotEstimate, summary
from tunecompile.memory import menu
from tunecompile.memory.budget import Budget, Menu
from tunecompile.memory.embedding import tables
from tunecompile.memory.gauge import MARGIN, Gauge, HostGauge, Spec, budget_bytes, gauge, gradient_bytes, moment_bytes, shown
from tunecompile.memory.offload import Offload
from tunecompile.memory.planner import KEEP, RECOMPUTE, Plan, Stack, choose
from tunecompile.partition import Decide
from tunecompile.plugins import pipeline
from tunecompile.regions import Region, Slot, Variant
from tunecompile.report import plan_lines
from tunecompile.sizes import Sizes, tensors_in

UNBOUNDED = 1 << 60  #: bytes


@dataclass(frozen=True)
class Estimate:
    """What a training step would need. Printable; `to_dict()` for machines. All amounts are bytes, unless they say otherwise.

    `milliseconds` are those of the layers' kernels, by their operations or by the bytes they read and write, at rates measured on this GPU, with head,
    loss, AdamW, and what the plan costs. Data loading is not in it, nor what a host takes that launches kernels more slowly than they run: too low
    for short steps without CUDA graphs.
    """

    model: str  #: its class
    batch_shape: tuple[int, int]  #: rows, tokens a row
    weights: int  #: bytes of parameters and buffers
    gradients: int  #: bytes, of what is trained
    optimizer: int  #: bytes of its state
    activations: int  #: bytes that layers hold for the backward pass, head and loss, at the peak
    peak: int  #: bytes, the sum of these, as `torch.cuda.max_memory_allocated` counts from the second step on
    budget: int | None  #: bytes that the peak may be, `margin` of them left to the allocator; None where nothing says so
    margin: int  #: bytes
    fits: bool | None  #: None without a budget
    missing: int  #: bytes by which it does not fit
    fitting_tokens: int | None  #: the largest batch that would fit, in tokens (0: none), where this one does not
    plans: list[dict[str, Any]]  #: as in the report: what layers compute again, whether the rest waits on the host, and how many layers do so
    flops: int  #: floating point operations of products and attention in one step, nothing counted twice and all of attention's square
    milliseconds: float | None  #: of one step; None on no GPU
    notes: list[str] = field(default_factory=list)  #: what to know about these figures

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows, length = self.batch_shape
        lines = [f"tunecompile: a training step of {self.model} on {rows} x {length} tokens"]
        lines += [f"  {name:12s}{shown(nbytes):>12s}" for name in ("weights", "gradients", "optimizer", "activations", "peak")
                  if (nbytes := getattr(self, name)) is not None]
        if self.budget is not None:
            verdict = "it fits" if self.fits else f"it does not fit: {shown(self.missing)} too much, {self.fitting_tokens} tokens would fit"
            lines.append(f"  {'allowed':12s}{shown(self.budget):>12s}, {shown(self.margin)} of it for the allocator: {verdict}")
        lines += plan_lines(self.plans)
        time = f", about {self.milliseconds:.0f} ms a step" if self.milliseconds is not None else ""
        return "\n".join([*lines, f"  {self.flops / 1e12:.3g} TFLOP{time}", *(f"  note: {note}" for note in self.notes)])


def estimate(model: nn.Module, batch_shape: tuple[int, int], *, memory: Spec = None, host_memory: Spec = None,
             host_embedding: bool | None = None, optimizer_bytes: int | None = None) -> Estimate:
    """What a training step of `optimize(model, memory=memory)` would need on batches of that shape, without running one.

    The model is not run and stays as it is, optimized or not. One layer of each kind is traced, which takes seconds; what the model's own code
    makes of positions (tables of RoPE, a sliding window's mask) is made. On a GPU its rate, and its attention kernels, are measured as in a first
    step, if that was not done before. Call it under `torch.autocast` if the training loop does.

    A model on a GPU is estimated for that GPU. One on the CPU or on the meta device is estimated as if it lay on a GPU, to whose memory weights,
    gradients and optimizer count; the GPU's context (about 0.5 GiB) and its faster kernels are not known there, nothing is offloaded, and no
    time is told. What else lies on the GPU is not counted.

    Args:
        model: any `nn.Module` whose forward takes token ids [rows, length], int64, as its first argument.
        batch_shape: (rows, length) in tokens, without padding.
        memory: as for `optimize`. None: what the model was optimized with; without any, the plan of a step without a budget, measured
            against all that the model's GPU has free. A share or "auto" needs a model on a GPU.
        host_memory: as for `optimize`. None: what the model was optimized with, else half of what is available.
        host_embedding: as for `optimize`. None: what the model was optimized with.
        optimizer_bytes: bytes of the optimizer's state on the GPU; None for two fp32 moments of each trained parameter, as AdamW has them.

    Returns:
        Bytes of each kind, whether they fit, and on a GPU milliseconds.

    Raises:
        BadBatchShape: `batch_shape` is not two positive integers.
        CannotEstimate: nothing in the model is trained, it is spread over devices, or it cannot be traced; the message says which.
        UnknownBudget: `memory` or `host_memory` is none of the forms `optimize` takes.
        InvalidPackage, UnknownEntryPoint: as for `optimize`.
    """
    if not (isinstance(batch_shape, (tuple, list)) and len(batch_shape) == 2 and all(type(n) is int and n > 0 for n in batch_shape)):
        raise BadBatchShape(given=batch_shape)
    name = type(model).__name__
    trained = [p for p in model.parameters() if p.requires_grad]
    devices = {p.device for p in model.parameters()}
    if not trained or len(devices) != 1:
        raise CannotEstimate(model=name, reason="nothing in it is trained" if not trained else f"its parameters lie on {len(devices)} devices")
    stage = _stage(model, memory, host_memory)
    spec, (device,) = stage.memory, devices
    if device.type != "cuda" and (spec == "auto" or isinstance(spec, float)):
        raise CannotEstimate(model=name, reason=f"memory={spec!r} is relative to a GPU's, and it lies on none. Give bytes, such as \"24GiB\"")
    ledger = Ledger(_weight_bytes(model) - _host_bytes(model, host_embedding), gradient_bytes(trained), moment_bytes(trained) if optimizer_bytes is None else optimizer_bytes,
                    gauge(device))
    rehearsal, notes = _rehearse(stage, ledger, spec, device, batch_shape)
    return _read(name, tuple(batch_shape), ledger, rehearsal, notes)


@dataclass(frozen=True)
class Ledger:
    """A gauge of what the model alone would hold on its device, once its optimizer has made a step."""

    weights: int
    gradients: int
    optimizer: int
    device: Gauge

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
class Rehearsal(Budget):
    """A budget for a step that will not run. All kinds of layers are surveyed; all that the model holds is in the gauge."""

    bounded: bool = True  #: whether there is a budget to plan for
    attends: bool = False  #: whether any layer's attention is fused

    def decide(self, graph: Graph, cut: menu.Cut, attention: float | None = None) -> Plan:
        self.attends = self.attends or any(node.op == "call_function" and "attention" in str(node.target) for node in graph.nodes)
        if self.bounded and len({id(slot.region) for slot in self.layers}) == 1:
            return super().decide(graph, cut, attention)
        candidates = menu.plans(graph) if self.bounded else [KEEP, RECOMPUTE]
        self.menus[id(self.running.region)] = Menu(tuple(menu.survey(cut, candidates)), self.tokens, tuple(map(menu.name, menu.dear_nodes(graph))),
                                                 attention=attention)
        self._admit(self.tokens)
        return self.options[id(self.running)].plan

    def most_tokens(self) -> int:
        """The largest batch that fits. Bytes are taken to follow tokens."""
        low, high = 0, self.admitted.tokens
        while high - low > 1:
            middle = (low + high) // 2
            fits = choose(self._stacks(middle)[0], self.admitted.room, self.tail(middle), self._host_bytes()).fits
            low, high = (middle, high) if fits else (low, middle)
        return low

    def flops(self) -> int:
        """Of all layers' forward and backward, nothing computed again, and of the heads."""
        kept = [(next(row for row in each.rows if row.plan == KEEP), self.tokens / each.tokens) for each in self._layers_menus()]
        return int(sum((row.ahead.flops + row.back.flops) * scale for row, scale in kept)) + self._beside_layers(self.tokens).flops

    def _stacks(self, tokens: int) -> tuple[list[Stack], list[list[Any]]]:
        stacks, slots = super()._stacks(tokens)
        if not self.bounded:  # layers do what the user's checkpointing says
            wanted = [RECOMPUTE if layers[0].checkpoint else KEEP for layers in slots]
            stacks = [replace(stack, options=tuple(o for o in stack.options if o.plan == plan)) for stack, plan in zip(stacks, wanted)]
        return stacks, slots

    def _to_come(self) -> int:
        return 0


class Glimpse(Backend):
    """Sees a layer's graph as a training step's backend would. What it returns computes nothing: results are blank."""

    attends = False  #: whether the layer calls attention by its name

    def __init__(self, region: Region, plan: Plan | None, decide: Decide | None, fakes: FakeTensorMode):
        super().__init__(region.name, region.passes, "eager", plan, precision=region.precision, decide=decide)
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
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)

    with fakes:
        return tree_map_only(Tensor, blank, like)


class GlimpseSlot:
    """What stands in the `_compiled_call_impl` of a skeleton's layer: the first of each kind is traced, the others return alike."""

    def __init__(self, slot: Slot, budget: Budget, fakes: FakeTensorMode, seen: dict[tuple, tuple[Glimpse, Any]]):
        self.slot, self.budget, self.fakes, self.seen = slot, budget, fakes, seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.slot.differentiable(args, kwargs)
        region, sizes = self.slot.region, Sizes.of(list(tensors_in(args, kwargs)))
        self.budget.option(self.slot, math.prod(sizes))
        glimpse, output = self.seen.get((id(region), sizes), (None, None))
        if glimpse is not None and id(region) in self.budget.menus:
            return _blank(output, self.fakes)
        known = id(region) in self.budget.menus  # if not: nothing in the layers before was trained
        glimpse = Glimpse(region, KEEP if known else None, None if known else self.budget.decide, self.fakes)
        variant = Variant(region.name, glimpse)  # Dynamo holds it weakly
        output = variant.call(self.slot.layer, *args, **kwargs)
        self.seen[id(region), sizes] = glimpse, output
        return output

    def note_eager(self) -> None:
        raise RuntimeError("Dynamo cannot trace it")


def _stage(model: nn.Module, memory: Spec, host_memory: Spec) -> State:
    """What `optimize` would attach to a skeleton of the model, with the options it was optimized with, if it was."""
    done: State | None = getattr(model, ATTRIBUTE, None)
    memory = done.memory if memory is None and done is not None else memory
    budget_bytes(memory, HostGauge())
    host = done.host_bytes if host_memory is None and done is not None else 0 if host_memory == 0 else budget_bytes(host_memory, HostGauge())
    passes = done.passes if done is not None else pipeline()
    return State(model, passes, "eager", done and done.precision, memory, host, done and done.offload_dir)


def _skeleton(model: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """The same modules and buffers anew, around the same parameters; on the meta device, around fakes of CPU tensors."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta and type(tensor) not in (Tensor, nn.Parameter):
            raise CannotEstimate(model=type(model).__name__, reason=f"a {type(tensor).__name__} on the meta device is not quantised yet")
        if tensor.is_meta:
            with fakes:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    try:
        return copy.deepcopy(model, memo).train()
    except Exception as error:
        raise CannotEstimate(model=type(model).__name__, reason=f"its modules cannot be copied: {summary(error)}") from error


def _rehearse(stage: State, ledger: Ledger, spec: Spec, device: torch.device, shape: Sequence[int]) -> tuple[Rehearsal, list[str]]:
    """Call a skeleton on a blank batch, with all that `optimize` attaches."""
    fakes, name = FakeTensorMode(allow_non_fake_inputs=True), type(stage.model).__name__
    stage.model, stage.memory = _skeleton(stage.model, fakes), None  # the step's budget is the rehearsal
    stage.attach()
    cuda, bounded = device.type == "cuda", spec is not None
    offload = Offload(device, stage.host_bytes, stage.offload_dir) if cuda and bounded and stage.host_bytes != 0 else None
    device = device if cuda else torch.device("cpu")
    rehearsal = stage.step.budget = Rehearsal(spec if bounded else "auto" if cuda else UNBOUNDED, stage.model, ledger, device, stage.slots,
                                              stage.heads, offload, bounded=bounded)
    seen: dict[tuple, tuple[Glimpse, Any]] = {}
    for slot in stage.slots:
        slot.layer._compiled_call_impl = GlimpseSlot(slot, rehearsal, fakes, seen)
    for slot in stage.norms:
        slot.layer._compiled_call_impl = None
    failure: Exception | None = None
    with fakes:
        ids = torch.empty(tuple(shape), dtype=torch.int64, device=device)
    try:
        with torch.enable_grad(), torch.random.fork_rng([device] if cuda else []):
            stage.model(ids)  # outside the fakes' mode: positions are real numbers, and tell the model that nothing needs a dense mask
    except Exception as error:  # of what comes behind the layers, perhaps
        failure = error
    said = [*rehearsal.notes, *(said for glimpse, _ in seen.values() for said in glimpse.failures)]
    left = list({id(slot.region): slot.region.name for slot in stage.slots if id(slot.region) not in rehearsal.menus}.values())
    if rehearsal.admitted is None or (left and failure is not None):
        reasons = said or [summary(failure) if failure else "the model calls no layer that is trained"]
        raise CannotEstimate(model=name, reason=reasons[0]) from failure
    unfused = any(glimpse.attends for glimpse, _ in seen.values()) and not rehearsal.attends
    return rehearsal, [*said, *(f"{region} was not called on such a batch: its layers are taken for others" for region in left),
                       *([UNFUSED] if unfused else []), *([] if cuda else [ABSENT])]


UNFUSED = "attention is traced without a fused kernel: its scores are counted, which grow with the square of the length"
ABSENT = "traced as on a CPU: the GPU's context (about 0.5 GiB) is not counted, and nothing waits on the host"


def _read(name: str, shape: tuple[int, int], ledger: Ledger, rehearsal: Rehearsal, notes: list[str]) -> Estimate:
    """What the rehearsal found out."""
    made = rehearsal.admitted
    known = rehearsal.bounded or rehearsal.device.type == "cuda"
    fits = made.choice.fits
    limit = rehearsal._limit()
    return Estimate(name, shape, ledger.weights, ledger.gradients, ledger.optimizer, made.choice.peak, made.peak, limit if known else None,
                    int(MARGIN * limit) if known else 0, fits if known else None, max(0, made.choice.peak - made.room),
                    None if fits else rehearsal.most_tokens(), rehearsal.summary()["plans"], rehearsal.flops(), rehearsal.step_ms(), notes)


def _weight_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, and of what 4-bit parameters carry with them."""
    found: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        found[id(tensor)] = tensor
        quantised = getattr(tensor, "quant_state", None)
        for holder in (quantised, getattr(quantised, "state2", None)):
            found |= {id(value): value for value in vars(holder).values() if isinstance(value, Tensor)} if holder is not None else {}
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def _host_bytes(model: nn.Module, asked: bool | None) -> int:
    """Of embedding tables that do not count to the device."""
    done: State | None = getattr(model, ATTRIBUTE, None)
    asked = done is not None and done.tables is not None if asked is None else asked
    return sum(table.nbytes for _, table in tables(model)[0]) if asked else 0
