"""`tunecompile plan`: memory, time and plan of each engine for a fine-tuning, and a recommendation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tunecompile.estimate.dry_run import rehearse
from tunecompile.estimate.dry_run_planner import DryRunPlanner, StaticMemory
from tunecompile.estimate.engines import (
    EngineCost,
    ModelBytes,
    Network,
    PipelineStage,
    ddp_cost,
    fsdp_cost,
    gathered,
    parts_of,
    replicated,
    sharded,
    stages,
    whole,
)
from tunecompile.estimate.estimate import Estimate, state_for, summarize
from tunecompile.estimate.meta_model import meta_model
from tunecompile.notes import Note, note
from tunecompile.planner.datasheets import HOST, DatasheetGauge, GpuSpec
from tunecompile.planner.device_memory import MARGIN, Spec, shown

SAME = 1.03  #: factor within which engines count as equally fast; the simplest is recommended
COUNTS = tuple(2**n for n in range(1, 11))  #: numbers of GPUs that are tried if fewer do not fit
MOST = 1 << 16  #: rows of the largest batch that is tried


@dataclass(frozen=True)
class Question:
    """The fine-tuning to plan, and the machines for it."""

    model: str  #: a shape, a folder, a config.json or a hub id
    mode: str  #: qlora, lora or full
    rows: int  #: rows on each GPU; with `together`, on all GPUs
    length: int  #: tokens of a row
    gpu: GpuSpec
    gpus: int = 1  #: number of GPUs
    per_node: int = 8  #: number of GPUs in one machine
    network: float = 50.0  #: between machines, for each GPU and in one direction: 1e9 bytes a second
    memory: Spec = None  #: as for `optimize`, for each GPU
    host_memory: Spec = None  #: as for `optimize`, for each GPU's process
    rank: int = 16  #: rank of the adapters
    together: bool = False  #: whether `rows` counts the rows of all GPUs
    shared_prefix: int = 0  #: tokens that all rows of a GPU begin with


@dataclass(frozen=True)
class EnginePlan:
    """The plan of one engine. Amounts are bytes on the fullest GPU."""

    engine: str  #: one GPU, DDP, FSDP2 or device_map
    gpus: int  #: number of GPUs that it uses
    rows: int  #: rows of the batch on each GPU; for device_map, of the one batch
    fits: bool
    missing: int  #: bytes missing
    weights: int  #: bytes of weights, with gathered layers
    gathered: int  #: bytes of the gathered layers among them
    gradients: int  #: bytes, with the buffers that the engine sends
    optimizer: int  #: bytes
    activations: int  #: bytes
    peak: int  #: bytes, the sum of these
    allowed: int  #: bytes allowed for the peak: the GPU's, or `memory`, less 5 % for the allocator
    step_ms: float  #: milliseconds
    communication_ms: float  #: milliseconds of communication, most of it hidden behind computation
    exposed_ms: float  #: milliseconds of communication that are not hidden
    tokens_per_s: float  #: tokens a second of all GPUs together
    plans: list[dict[str, Any]]  #: plans of the layers, as in `Estimate`
    memory: Spec  #: the argument for `optimize`
    most_rows: int  #: the most rows that fit under the plans that were tried; 0 for none
    help: str | None = None  #: which change would help most, if it does not fit

    @property
    def share(self) -> float:
        """The fraction of the step in which GPUs wait for each other."""
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0


@dataclass(frozen=True)
class PlanReport:
    """The plans of all engines, and the recommended one."""

    question: Question
    engines: list[EnginePlan]
    best: str | None  #: the recommended engine; None if none fits
    reason: str  #: of the recommendation
    flops: int  #: floating point operations of one GPU's step
    notes: list[Note] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON."""
        fields = asdict(self)
        for values, engine in zip(fields["engines"], self.engines, strict=True):
            values["communication_share"] = engine.share
        return fields


def plan(question: Question) -> PlanReport:
    """Plan a fine-tuning, by the model's config alone.

    Raises:
        CannotEstimate: no model can be made of the config, or it cannot be traced.
        MissingExtra, NoConfig: as `meta_model` does.
        UnknownBudget: `memory` or `host_memory` cannot be read.
        BadSharedPrefix: rows are not longer than what they share.
    """
    return MultiGpuPlanner(question).report()


class MultiGpuPlanner:
    """Answers one question. Engines that choose from the same plans share a dry run."""

    def __init__(self, question: Question):
        self.question, self.sheet = question, DatasheetGauge(question.gpu)
        self.model: nn.Module = meta_model(question.model, question.mode, question.rank, question.gpu.dtype)
        self.parts: ModelBytes = parts_of(self.model)
        self.network = Network(question.gpu, question.gpus, question.per_node, question.network)
        self.dry_runs: dict[tuple, tuple[DryRunPlanner, list[Note]]] = {}
        self.notes: dict[Note, None] = {}
        self.flops = 0

    def report(self) -> PlanReport:
        """The plans of all engines."""
        asked = self.question
        engines = [self.one_gpu()]
        if asked.gpus > 1:
            staged = len(self.parts.layers) > 1 and self.model.get_input_embeddings() is not None
            engines += [self.ddp(), self.fsdp(), *([self.device_map()] if staged else [])]
        best, reason = recommended(engines, self.parts, self.network)
        return PlanReport(asked, engines, best, reason, self.flops, [*self.notes, *self._restrictions()])

    def one_gpu(self) -> EnginePlan:
        """The plan of one GPU."""
        return self._engine("one GPU", self.question.rows, whole(self.parts, self.sheet), 1)

    def ddp(self) -> EnginePlan:
        """The plan of DDP."""

        def cost(forward: float, backward: float) -> EngineCost:
            return ddp_cost(self.parts, self.network, backward)

        return self._engine("DDP", self._rows_each(), replicated(self.parts, self.sheet), self.question.gpus, cost)

    def fsdp(self) -> EnginePlan:
        """The plan of FSDP2."""

        def cost(forward: float, backward: float) -> EngineCost:
            return fsdp_cost(self.parts, self.network, forward, backward, self.question.gpu.rates.bandwidth)

        return self._engine(
            "FSDP2", self._rows_each(), sharded(self.parts, self.question.gpus, self.sheet), self.question.gpus, cost
        )

    def device_map(self) -> EnginePlan:
        """The plan of a device_map over the GPUs of one machine, which run in turn and hand hidden states on."""
        made = self._in_turn(self.question.memory)
        return self._helped(made if made.fits or made.memory is not None else self._in_turn("auto"))

    def _in_turn(self, memory: Spec) -> EnginePlan:
        asked, gpus = self.question, min(self.question.gpus, self.question.per_node, len(self.parts.layers))
        dry_run, notes = self._dry_run(asked.rows, replace(whole(self.parts, self.sheet), spread=True), memory)
        self.notes |= dict.fromkeys(notes)
        room = dry_run.allowed() - int(MARGIN * dry_run.allowed())
        found = stages(self.parts, gpus, dry_run, room)
        held = max(found, key=lambda stage: stage.peak)
        states = 2 * asked.rows * asked.length * self.model.get_input_embeddings().weight.shape[1]
        sent = 2 * (gpus - 1) * self.network.send(states)
        step = dry_run.step_ms() - dry_run.admitted.choice.ms + sum(stage.choice.ms for stage in found) + sent
        missing = max(0, held.peak - room)
        most = self._most(
            asked.rows,
            lambda rows: all(stage.choice.fits for stage in stages(self.parts, gpus, dry_run, room, rows / asked.rows)),
        )
        return EnginePlan(
            "device_map",
            gpus,
            asked.rows,
            not missing,
            missing,
            held.weights,
            0,
            held.gradients,
            held.optimizer,
            held.activations,
            held.peak,
            room,
            step,
            sent,
            sent,
            asked.rows * asked.length / step * 1e3,
            _plans(dry_run, found),
            memory,
            most,
        )

    def _rows_each(self) -> int:
        return self.question.rows // self.question.gpus if self.question.together else self.question.rows

    def _engine(
        self, name: str, rows: int, static: StaticMemory, gpus: int, cost=lambda forward, backward: EngineCost()
    ) -> EnginePlan:
        asked, memory = self.question, self.question.memory
        dry_run, estimate = self._estimate(rows, static, memory)
        if memory is None and not estimate.fits:
            memory = "auto"
            dry_run, estimate = self._estimate(rows, static, memory)
        forward, work = dry_run.forward_ms(), dry_run.admitted.choice.work
        added = cost(forward, work - forward)
        alone = estimate.milliseconds - (1 - 1 / gpus) * dry_run.optimizer_ms() * static.sharded
        step = alone + added.exposed + added.copied
        most = self._most(rows, lambda n: dry_run.holds(n * asked.length))
        return self._helped(
            EnginePlan(
                name,
                gpus,
                rows,
                bool(estimate.fits),
                estimate.missing,
                estimate.weights,
                gathered(self.parts) if static.sharded else 0,
                estimate.gradients,
                estimate.optimizer,
                estimate.activations,
                estimate.peak,
                estimate.budget - estimate.margin,
                step,
                added.sent,
                added.exposed,
                gpus * rows * asked.length / step * 1e3,
                estimate.plans,
                memory,
                most,
            )
        )

    def _estimate(self, rows: int, static: StaticMemory, memory: Spec) -> tuple[DryRunPlanner, Estimate]:
        dry_run, notes = self._dry_run(rows, static, memory)
        self.notes |= dict.fromkeys(notes)
        estimate = summarize(type(self.model).__name__, (rows, self.question.length), static, dry_run, notes)
        self.flops = estimate.flops
        return dry_run, estimate

    def _dry_run(self, rows: int, static: StaticMemory, memory: Spec) -> tuple[DryRunPlanner, list[Note]]:
        key = (rows, memory)  # one dry run serves all engines
        if key not in self.dry_runs or not self.dry_runs[key][0].under(static):
            host_memory = HOST if self.question.host_memory is None else self.question.host_memory
            state = state_for(self.model, memory, host_memory)
            with torch.autocast("cpu", self.question.gpu.dtype):
                self.dry_runs[key] = rehearse(
                    state,
                    static,
                    torch.device("meta"),
                    (rows, self.question.length),
                    self.question.gpu,
                    thorough=True,
                    shared_prefix=self.question.shared_prefix,
                )
        return self.dry_runs[key]

    def _most(self, rows: int, fits: Callable[[int], bool]) -> int:
        """The rows of the largest batch that fits."""
        low, high = (rows, 2 * rows) if fits(rows) else (0, rows)
        while low == high // 2 and low and high < MOST and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _helped(self, made: EnginePlan) -> EnginePlan:
        """The plan, with the change that would help most if it does not fit."""
        return made if made.fits else replace(made, help=self._help(made))

    def _help(self, made: EnginePlan) -> str:
        """The changes that help: first fewer rows or more GPUs, then fewer trained weights or a base of fewer bits."""
        asked = self.question
        found = [f"{made.most_rows} rows of {asked.length:,} tokens fit"] if made.most_rows else []
        room, least = made.allowed - made.activations, asked.gpus + (made.engine == "FSDP2")
        fits = (n for n in COUNTS if n >= least and sharded(self.parts, n, self.sheet).allocated() <= room)
        if not found and (enough := next(fits, None)):
            found.append(f"FSDP2 over {enough} GPUs fits")
        smaller = {
            mode: self._with_mode(made, mode)
            for mode in {"full": ("lora", "qlora"), "lora": ("qlora",)}.get(asked.mode, ())
        }
        if mode := next(
            (mode for mode in smaller if made.peak - smaller[mode] >= made.missing),
            min(smaller, key=lambda mode: smaller[mode], default=None),
        ):
            found.append(f"--{mode} needs {shown(made.peak - smaller[mode])} less")
        if rank := self._rank_that_fits(made):
            found.append(f"--rank {rank} fits")
        return ", or ".join(found or [f"rows of half the length need {shown(made.activations // 2)} less"])

    def _rank_that_fits(self, made: EnginePlan) -> int | None:
        """The largest rank, the asked one halved once or more, of adapters with which it fits; None for none.

        Adapters over experts may take more than the base: of Qwen3-30B-A3B 9.6 GiB at rank 16, the base in NF4 15.5.
        """
        asked = self.question
        trained = 0 if asked.mode == "full" else 2 * made.gradients + made.optimizer  # adapters are as many bytes again
        ranks = (asked.rank >> step for step in range(1, asked.rank.bit_length()))
        near = next((rank for rank in ranks if trained * (1 - rank / asked.rank) >= made.missing), None)
        fits = near and made.peak - self._with_mode(made, asked.mode, near) >= made.missing
        return near if fits else None

    def _with_mode(self, made: EnginePlan, mode: str, rank: int | None = None) -> int:
        """Bytes at the peak in another mode or of another rank, if activations stay the same."""
        parts = parts_of(meta_model(self.question.model, mode, rank or self.question.rank, self.question.gpu.dtype))
        static = {"DDP": replicated, "one GPU": whole, "device_map": whole}.get(made.engine)
        held = sharded(parts, made.gpus, self.sheet) if static is None else static(parts, self.sheet)
        share = made.gpus if made.engine == "device_map" else 1
        return held.allocated() // share + made.activations

    def _restrictions(self) -> list[Note]:
        gpu, asked = self.question.gpu, self.question
        told = [] if gpu.measured else [note("gpu-not-measured", gpu.title)]
        if asked.mode == "full":
            told.append(note("full-training-state", str(gpu.dtype).removeprefix("torch.")))
        if asked.mode == "qlora" and asked.gpus > 1:
            told.append(note("fsdp2-shards-floats"))
        if asked.gpus > 1:
            told.append(note("communication-modelled"))
        return told


def _plans(dry_run: DryRunPlanner, found: list[PipelineStage]) -> list[dict[str, Any]]:
    """The plans of the layers of all stages."""
    return dry_run.count_options(option for stage in found for options in stage.choice.options for option in options)


def recommended(engines: list[EnginePlan], parts: ModelBytes, network: Network) -> tuple[str | None, str]:
    """The name of the recommended engine, and a sentence why.

    It is the fastest that fits, or, of those within the factor `SAME`, the simplest, which comes first.
    """
    fine = [engine for engine in engines if engine.fits]
    if not fine:
        near = min(engines, key=lambda engine: engine.missing)
        return None, f"{near.engine} is nearest, {shown(near.missing)} too much; {near.help}"
    fastest = max(engine.tokens_per_s for engine in fine)
    best = next(engine for engine in fine if SAME * engine.tokens_per_s >= fastest)
    return best.engine, _reason(best, fine, engines, parts)


def _reason(best: EnginePlan, fine: list[EnginePlan], engines: list[EnginePlan], parts: ModelBytes) -> str:
    if len(engines) == 1:
        return "it fits"
    why = {
        "one GPU": "it is as fast as the others, without communication",
        "DDP": f"every GPU holds the whole model, and only {shown(parts.all.gradients)} of gradients are sent, "
        f"{best.exposed_ms:.1f} ms of a step not hidden",
        "FSDP2": f"each GPU holds a shard and gathers layers, {best.exposed_ms:.1f} ms of a step not hidden",
        "device_map": "GPUs run one after the other, but no other engine fits",
    }[best.engine]
    others = [engine for engine in fine if engine is not best]
    if others and best.engine != "one GPU":
        second = max(others, key=lambda engine: engine.tokens_per_s)
        why += f"; {second.engine} gives {second.tokens_per_s:,.0f} tokens/s"
    missing = [f"{engine.engine} lacks {shown(engine.missing)}" for engine in engines if not engine.fits]
    return "; ".join([why, *missing])
