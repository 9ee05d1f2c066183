"""`estimate`: whether a batch will fit, and how long its step takes, without running one. The model is only read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile import passes as own_passes
from tunecompile.compiler.plugins import pipeline
from tunecompile.errors import BadBatchShape, CannotEstimate
from tunecompile.estimate.dry_run import DryRunPlanner, StaticMemory, rehearse
from tunecompile.estimate.meta_nf4 import held, stand_ins
from tunecompile.planner.datasheets import DatasheetGauge, GpuSpec, find_gpu
from tunecompile.planner.device_memory import (
    MARGIN,
    HostGauge,
    Spec,
    budget_bytes,
    gauge_of,
    gradient_bytes,
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
    """What a training step would need. Printable; `to_dict()` for machines. All amounts are bytes, unless they say otherwise.

    `milliseconds` are those of the layers' kernels, by their operations or by the bytes they read and write, at rates measured on this GPU, or taken from a datasheet, with head,
    loss, AdamW, and what the plan costs. Data loading is not in it, nor what a host takes that launches kernels more slowly than they run: too low
    for short steps without CUDA graphs.
    """

    model: str  #: its class
    batch_shape: tuple[int, int]  #: rows, tokens a row
    weights: int  #: bytes of parameters and buffers
    gradients: int  #: bytes, of what is trained
    optimizer: int  #: bytes of its state
    activations: int  #: bytes that come to these at the peak: what layers hold for the backward pass, head and loss, less gradients that are not there yet
    peak: int  #: bytes, the sum of these, as `torch.cuda.max_memory_allocated` counts from the second step on
    budget: (
        int | None
    )  #: bytes that the peak may be, `margin` of them left to the allocator; None where nothing says so
    margin: int  #: bytes
    fits: bool | None  #: None without a budget
    missing: int  #: bytes by which it does not fit
    fitting_tokens: int | None  #: the largest batch that would fit, in tokens (0: none), where this one does not
    plans: list[
        dict[str, Any]
    ]  #: as in the report: what layers compute again, whether the rest waits on the host, and how many layers do so
    flops: int  #: floating point operations of products and attention in one step, nothing counted twice and all of attention's square
    milliseconds: float | None  #: of one step; None for no GPU
    notes: list[str] = field(default_factory=list)  #: what to know about these figures

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, ready for JSON."""
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
    memory: Spec = None,
    host_memory: Spec = None,
    host_embedding: bool | None = None,
    optimizer_bytes: int | None = None,
    gpu: str | None = None,
) -> Estimate:
    """What a training step of `optimize(model, memory=memory)` would need on batches of that shape, without running one.

    The model is not run and stays as it is, optimized or not. One layer of each kind is traced, which takes seconds; what the model's own code
    makes of positions (tables of RoPE, a sliding window's mask) is made. On a GPU its rate, and its attention kernels, are measured as in a first
    step, if that was not done before. Call it under `torch.autocast` if the training loop does.

    A model on a GPU is estimated for that GPU. One on the CPU or on the meta device is estimated for the GPU that `gpu` names, by its datasheet: by
    the kernels that a GPU has, at rates that kernels were measured to reach of such figures. Without `gpu` weights, gradients and optimizer count
    to the memory of some GPU, whose context (about 0.5 GiB) and faster kernels are not known; nothing is offloaded, and no
    time is told. What else lies on the GPU is not counted. Linears of bitsandbytes on the meta device count as if they were quantised.

    Args:
        model: any `nn.Module` whose forward takes token ids [rows, length], int64, as its first argument.
        batch_shape: (rows, length) in tokens, without padding.
        memory: as for `optimize`. None: what the model was optimized with; without any, the plan of a step without a budget, measured
            against all that the GPU has free. A share or "auto" needs a model on a GPU, or `gpu`.
        host_memory: as for `optimize`. None: what the model was optimized with, else half of what is available, with `gpu` 64 GiB.
        host_embedding: as for `optimize`. None: what the model was optimized with.
        optimizer_bytes: bytes of the optimizer's state on the GPU; None for two moments of each trained parameter, in its dtype, as torch's AdamW has them.
        gpu: a GPU that is not there, such as "h200", "rtx4090", or with figures of its own "h100,memory=94GiB"; None for the model's own device.

    Returns:
        Bytes of each kind, whether they fit, and on or for a GPU milliseconds.

    Raises:
        BadBatchShape: `batch_shape` is not two positive integers.
        CannotEstimate: nothing in the model is trained, it is spread over devices, or it cannot be traced; the message says which.
        UnknownGpu: no datasheet of `gpu` is known; the message names those that are.
        UnknownBudget: `memory` or `host_memory` is none of the forms `optimize` takes.
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
    stage = stage_of(model, memory, host_memory)
    _refuse(model, trained, spread, stage.memory, sheet)
    (device,) = spread
    ledger = StaticMemory(
        _weight_bytes(model) - _host_bytes(model, host_embedding),
        gradient_bytes(trained),
        moment_bytes(trained) if optimizer_bytes is None else optimizer_bytes,
        gauge_of(device) if sheet is None else DatasheetGauge(sheet),
        growing=1.0,
    )
    rehearsal, notes = rehearse(stage, ledger, device, batch_shape, sheet)
    return read(type(model).__name__, tuple(batch_shape), ledger, rehearsal, notes)


def _refuse(
    model: nn.Module, trained: Sequence[nn.Parameter], devices: set[torch.device], spec: Spec, gpu: GpuSpec | None
) -> None:
    """What can be known before anything is traced."""
    if not trained or len(devices) != 1:
        raise CannotEstimate(
            model=type(model).__name__,
            reason=f"its parameters lie on {len(devices)} devices" if trained else "nothing in it is trained",
        )
    on_gpu = next(iter(devices)).type == "cuda"
    if on_gpu and gpu is not None:
        raise CannotEstimate(
            model=type(model).__name__,
            reason=f"it lies on a GPU, for which gpu={gpu.name!r} cannot stand. Leave it out, or give the model on the CPU or the meta device",
        )
    if not on_gpu and gpu is None and (spec == "auto" or isinstance(spec, float)):
        raise CannotEstimate(
            model=type(model).__name__,
            reason=f'memory={spec!r} is relative to a GPU\'s, and it lies on none. Give bytes, such as "24GiB", or gpu=',
        )


def stage_of(model: nn.Module, memory: Spec, host_memory: Spec) -> State:
    """What `optimize` would attach to a skeleton of the model, with the options it was optimized with, if it was."""
    done: State | None = getattr(model, ATTRIBUTE, None)
    memory = done.memory if memory is None and done is not None else memory
    budget_bytes(memory, HostGauge())
    host = (
        done.host_bytes
        if host_memory is None and done is not None
        else 0
        if host_memory == 0
        else budget_bytes(host_memory, HostGauge())
    )
    passes = done.passes if done is not None else pipeline(own_passes.PIPELINE)
    settings = Settings(passes, "eager", done and done.precision, memory, host, done and done.offload_dir)
    return State(model, settings, PARTS)


def read(
    name: str, shape: tuple[int, int], ledger: StaticMemory, rehearsal: DryRunPlanner, notes: list[str]
) -> Estimate:
    """What the rehearsal found out."""
    made = rehearsal.admitted
    known = rehearsal.bounded or rehearsal.device.type == "cuda" or rehearsal.gpu is not None
    fits = made.choice.fits
    limit = rehearsal.allowed()
    return Estimate(
        name,
        shape,
        ledger.weights + made.weights,
        ledger.gradients,
        ledger.optimizer,
        made.peak - ledger.allocated() - made.weights,
        made.peak,
        limit if known else None,
        int(MARGIN * limit) if known else 0,
        fits if known else None,
        max(0, made.choice.peak - made.room),
        None if fits else rehearsal.most_tokens(),
        rehearsal.summary()["plans"],
        rehearsal.flops(),
        rehearsal.step_ms(),
        notes,
    )


def _weight_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, and of what 4-bit parameters carry with them."""
    found: dict[int, Tensor] = {}
    for tensor in held(model, stand_ins(model)):
        found[id(tensor)] = tensor
        quantised = getattr(tensor, "quant_state", None)
        for holder in (quantised, getattr(quantised, "state2", None)):
            found |= (
                {id(value): value for value in vars(holder).values() if isinstance(value, Tensor)}
                if holder is not None
                else {}
            )
    return sum(map(part_bytes, found.values()))


def _host_bytes(model: nn.Module, asked: bool | None) -> int:
    """Of embedding tables that do not count to the device."""
    done: State | None = getattr(model, ATTRIBUTE, None)
    asked = done is not None and done.settings.host_embedding if asked is None else asked
    return sum(table.nbytes for _, table in tables(model)[0]) if asked else 0


