"""`estimate`: whether a batch fits, and how long its step takes, without running it. The model is only read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile import passes as own_passes
from tunecompile.compiler.plugins import pipeline
from tunecompile.errors import BadBatchShape, CannotEstimate
from tunecompile.estimate.dry_run import rehearse
from tunecompile.estimate.dry_run_planner import DryRunPlanner, StaticMemory
from tunecompile.estimate.meta_model import counted_tensors, meta_linears
from tunecompile.integrations.packed_experts.stacks import scales_of
from tunecompile.notes import Note
from tunecompile.planner.datasheets import DatasheetGauge, GpuSpec, find_gpu
from tunecompile.planner.device_memory import (
    MARGIN,
    HostGauge,
    Spec,
    budget_bytes,
    gauge_of,
    gradient_bytes,
    host_budget_bytes,
    moment_bytes,
    part_bytes,
    shown,
)
from tunecompile.planner.solver import plan_lines
from tunecompile.runtime.memory.host_embedding import tables
from tunecompile.runtime.model_state import ATTRIBUTE, Settings, State
from tunecompile.runtime.parts import PARTS


@dataclass(frozen=True)
class Estimate:
    """The memory and time of a training step. Print it, or read it with `to_dict()`. Amounts are bytes, if not noted.

    `milliseconds` covers the kernels of layers, head, loss and AdamW, and the cost of the plan. A kernel's time follows
    from its operations or from the bytes it reads and writes, at rates measured on this GPU or taken from a datasheet.
    Data loading is not included, and neither is a host that launches kernels more slowly than they run: the time is too
    low for short steps without CUDA graphs.
    """

    model: str  #: class of the model
    batch_shape: tuple[int, int]  #: rows, tokens a row
    weights: int  #: bytes of parameters and buffers
    gradients: int  #: bytes of all gradients
    optimizer: int  #: bytes of the optimizer's state
    #: bytes added at the peak: saved for backward, head and loss, less the gradients that do not exist yet
    activations: int
    peak: int  #: bytes, the sum of these, as `torch.cuda.max_memory_allocated` counts from the second step on
    budget: int | None  #: bytes allowed for the peak and the allocator's `margin`; None if there is no limit
    margin: int  #: bytes
    fits: bool | None  #: None without a budget
    missing: int  #: bytes missing
    fitting_tokens: int | None  #: tokens of the largest batch that fits (0: none); None if this one fits
    plans: list[dict[str, Any]]  #: as in the report: what layers recompute and offload, and how many layers do
    #: floating point operations of products and attention in one step, without recomputation, with all of the mask
    flops: int
    milliseconds: float | None  #: of one step; None without a GPU
    notes: list[Note] = field(default_factory=list)  #: restrictions of these figures

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows, length = self.batch_shape
        lines = [f"tunecompile: a training step of {self.model} on {rows} x {length} tokens"]
        lines += [
            f"  {name:12s}{shown(nbytes):>12s}"
            for name in ("weights", "gradients", "optimizer", "activations", "peak")
            if (nbytes := getattr(self, name)) is not None
        ]
        if self.budget is not None:
            verdict = (
                "it fits"
                if self.fits
                else f"it does not fit: {shown(self.missing)} too much, {self.fitting_tokens} tokens would fit"
            )
            lines.append(
                f"  {'allowed':12s}{shown(self.budget):>12s}, {shown(self.margin)} of it for the allocator: {verdict}"
            )
        lines += plan_lines(self.plans)
        time = f", about {self.milliseconds:.0f} ms a step" if self.milliseconds is not None else ""
        return "\n".join(
            [*lines, f"  {self.flops / 1e12:.3g} TFLOP{time}", *(f"  note: {note}" for note in self.notes)]
        )


def estimate(
    model: nn.Module,
    batch_shape: tuple[int, int],
    *,
    shared_prefix: int = 0,
    memory: Spec = None,
    host_memory: Spec = None,
    host_embedding: bool | None = None,
    optimizer_bytes: int | None = None,
    gpu: str | None = None,
) -> Estimate:
    """Estimate memory and time of a training step of `optimize(model, memory=memory)`, without running one.

    The model is not run or changed, whether it is optimized or not. One layer of each kind is traced, which takes
    seconds, and tensors that the model's code derives from positions (RoPE tables, the mask of a sliding window) are
    computed. The rates and the attention kernels of a GPU are measured, as in a first step, unless they are known. Call
    this under `torch.autocast` if the training loop uses it.

    A model on a GPU is estimated for that GPU. A model on the CPU or the meta device is estimated for the GPU named by
    `gpu`, by its datasheet: with the kernels of a GPU, at the share of the datasheet's rates that kernels were measured
    to reach. Without `gpu`, weights, gradients and optimizer count to the memory of an unknown GPU, without its context
    (about 0.5 GiB) and its faster kernels; nothing is offloaded, and there is no time. Other memory in use on the GPU
    is not counted. Linears of bitsandbytes on the meta device count as quantised.

    Args:
        model: any `nn.Module` whose forward takes token ids [rows, length], int64, as its first argument.
        batch_shape: (rows, length) in tokens, without padding.
        shared_prefix: tokens that all rows begin with, such as the prompt of GRPO's completions: layers compute them
            once, where a training step would.
        memory: as for `optimize`. None: the budget that the model was optimized with; without one, a step without a
            budget, compared with all free memory of the GPU. A fraction or "auto" needs a model on a GPU, or `gpu`.
        host_memory: as for `optimize`. None: what the model was optimized with; else 64 GiB with `gpu`, and half of
            what is available without it.
        host_embedding: as for `optimize`. None: what the model was optimized with.
        optimizer_bytes: bytes of the optimizer's state on the GPU. None: two moments of each trained parameter in its
            dtype, as in torch's AdamW.
        gpu: a GPU that need not be present, such as "h200" or "rtx4090", or with changed figures,
            "h100,memory=94GiB". None: the device of the model.

    Returns:
        An `Estimate` with bytes by kind, whether they fit, and, for a GPU, milliseconds.

    Raises:
        BadBatchShape: `batch_shape` is not two positive integers.
        BadSharedPrefix: rows are not longer than `shared_prefix`, or it is negative.
        CannotEstimate: nothing in the model is trained, it spans several devices, or it cannot be traced.
        UnknownGpu: there is no datasheet of `gpu`; the message names the known ones.
        UnknownBudget: `memory` or `host_memory` is none of the forms that `optimize` accepts.
        InvalidPackage, UnknownEntryPoint: as for `optimize`.
    """
    if not (
        isinstance(batch_shape, (tuple, list))
        and len(batch_shape) == 2
        and all(type(n) is int and n > 0 for n in batch_shape)
    ):
        raise BadBatchShape(given=batch_shape)
    spread = {p.device for p in model.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    sheet = None if gpu is None else find_gpu(gpu)
    state = state_for(model, memory, host_memory)
    _refuse(model, trained, spread, state.memory, sheet)
    (device,) = spread
    static = StaticMemory(
        _weight_bytes(model) - _host_bytes(model, host_embedding),
        gradient_bytes(trained),
        moment_bytes(trained) if optimizer_bytes is None else optimizer_bytes,
        gauge_of(device) if sheet is None else DatasheetGauge(sheet),
        growing=1.0,
    )
    with torch.inference_mode(False):  # there, nothing is trained
        dry_run, notes = rehearse(state, static, device, batch_shape, sheet, shared_prefix=shared_prefix)
    rows, length = batch_shape
    return summarize(type(model).__name__, (rows, length), static, dry_run, notes)


def _refuse(
    model: nn.Module, trained: Sequence[nn.Parameter], devices: set[torch.device], spec: Spec, gpu: GpuSpec | None
) -> None:
    """Raise CannotEstimate for reasons that need no tracing."""
    if not trained or len(devices) != 1:
        raise CannotEstimate(
            model=type(model).__name__,
            reason=f"its parameters lie on {len(devices)} devices" if trained else "nothing in it is trained",
        )
    on_gpu = next(iter(devices)).type == "cuda"
    if on_gpu and gpu is not None:
        raise CannotEstimate(
            model=type(model).__name__,
            reason=f"it is on a GPU, so gpu={gpu.name!r} cannot replace it. Omit gpu, or pass the model on the CPU or "
            "the meta device",
        )
    if not on_gpu and gpu is None and (spec == "auto" or isinstance(spec, float)):
        raise CannotEstimate(
            model=type(model).__name__,
            reason=f'memory={spec!r} is relative to a GPU\'s, and it is on none. Give bytes, such as "24GiB", or gpu=',
        )


def state_for(model: nn.Module, memory: Spec, host_memory: Spec) -> State:
    """The state that `optimize` would attach, by default with the options that the model was optimized with."""
    done: State | None = getattr(model, ATTRIBUTE, None)
    memory = done.memory if memory is None and done is not None else memory
    budget_bytes(memory, HostGauge())
    host = done.settings.host_bytes if host_memory is None and done is not None else host_budget_bytes(host_memory)
    passes = done.passes if done is not None else pipeline(own_passes.PIPELINE)
    settings = Settings(passes, "eager", done and done.precision, memory, host, done and done.settings.offload_dir)
    return State(model, settings, PARTS)


def summarize(
    name: str, shape: tuple[int, int], static: StaticMemory, dry_run: DryRunPlanner, notes: list[Note]
) -> Estimate:
    """The estimate, from a dry run that has admitted a plan.

    Args:
        name: class of the model.
        shape: of the batch, (rows, tokens a row).
        static: memory besides activations.
        dry_run: as `rehearse` returned it.
        notes: as `rehearse` returned them.
    """
    made = dry_run.admitted
    assert made is not None  # else `rehearse` raises
    known = dry_run.bounded or dry_run.device.type == "cuda" or dry_run.gpu is not None
    fits = made.choice.fits
    limit = dry_run.allowed()
    return Estimate(
        name,
        shape,
        static.weights + made.weights,
        static.gradients,
        static.optimizer,
        made.peak - static.allocated() - made.weights,
        made.peak,
        limit if known else None,
        int(MARGIN * limit) if known else 0,
        fits if known else None,
        max(0, made.choice.peak - made.room),
        None if fits else dry_run.most_tokens(),
        dry_run.plans_by_layer(),
        dry_run.flops(),
        dry_run.step_ms(),
        notes,
    )


def _weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, and of the scales of 4-bit parameters."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensor in scales_of(model)}
    for tensor in counted_tensors(model, meta_linears(model)):
        found[id(tensor)] = tensor
        quantised = getattr(tensor, "quant_state", None)
        for holder in (quantised, getattr(quantised, "state2", None)):
            values = vars(holder).values() if holder is not None else ()
            found |= {id(value): value for value in values if isinstance(value, Tensor)}
    return sum(map(part_bytes, found.values()))


def _host_bytes(model: nn.Module, on_host: bool | None) -> int:
    """Bytes of embedding tables in host memory. on_host: as `host_embedding` of `estimate`."""
    done: State | None = getattr(model, ATTRIBUTE, None)
    if on_host is None:
        on_host = done is not None and done.settings.host_embedding
    return sum(table.nbytes for _, table in tables(model)[0]) if on_host else 0
