"""The answer to "what does it take to fine-tune this?": each engine's memory, time and plan, and which of them to take."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tunecompile.estimate.dry_run import DryRunPlanner, StaticMemory, rehearse
from tunecompile.estimate.engines import (
    EngineCost,
    ModelBytes,
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
from tunecompile.estimate.estimate import Estimate, read, stage_of
from tunecompile.estimate.meta_model import hollow_model
from tunecompile.estimate.network import Network
from tunecompile.planner.datasheets import HOST, DatasheetGauge, GpuSpec
from tunecompile.planner.device_memory import MARGIN, Spec, shown

SAME = 1.03  #: factor within which two engines are equally fast: then the simpler one is taken
COUNTS = tuple(2**n for n in range(1, 11))  #: numbers of GPUs that are looked at where fewer do not do
MOST = 1 << 16  #: rows, beyond which no larger batch is looked for


@dataclass(frozen=True)
class Question:
    """What is to be planned."""

    model: str  #: a shape, a folder, a config.json or a hub id
    mode: str  #: qlora, lora or full
    rows: int  #: on each GPU, or of all GPUs together if `together`
    length: int  #: tokens of a row
    gpu: GpuSpec
    gpus: int = 1  #: number of GPUs
    per_node: int = 8  #: number of GPUs in one machine
    network: float = 50.0  #: between machines, for each GPU and in one direction: 1e9 bytes a second
    memory: Spec = None  #: as for `optimize`, of each GPU
    host_memory: Spec = None  #: as for `optimize`, of each GPU's process
    rank: int = 16  #: number of rows of an adapter's first matrix
    together: bool = False  #: whether `rows` are those of all GPUs


@dataclass(frozen=True)
class EnginePlan:
    """One engine's answer. Amounts are bytes on the fullest GPU."""

    engine: str  #: one GPU, DDP, FSDP2 or device_map
    gpus: int  #: number that it uses
    rows: int  #: of a batch on each GPU; of the one batch, where GPUs take turns
    fits: bool
    missing: int  #: bytes by which it does not fit
    weights: int  #: bytes of what a GPU holds for good, and of gathered layers
    gathered: int  #: bytes of these that are gathered for a while
    gradients: int  #: bytes, with the copies that the engine sends
    optimizer: int  #: bytes
    activations: int  #: bytes
    peak: int  #: bytes, the sum of these
    allowed: (
        int  #: bytes that the peak may be: those of the GPU, or of `memory`, but for 5 % that are left to the allocator
    )
    step_ms: float  #: milliseconds
    communication_ms: float  #: milliseconds in which GPUs send, most of them behind what they compute
    exposed_ms: float  #: milliseconds of these that the step is longer for
    tokens_per_s: float  #: number of tokens a second of all GPUs together
    plans: list[dict[str, Any]]  #: what layers compute again, as in `Estimate`
    memory: Spec  #: what to give `optimize`
    most_rows: int  #: rows that would fit under the plans that were looked at; 0 for none
    help: str | None = None  #: what would help most, where it does not fit

    @property
    def share(self) -> float:
        """Of the step in which GPUs wait for each other."""
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0


@dataclass(frozen=True)
class PlanReport:
    """All engines' answers, and the one to take."""

    question: Question
    engines: list[EnginePlan]
    best: str | None  #: engine; None where none fits
    reason: str
    flops: int  #: floating point operations of one GPU's step
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, ready for JSON."""
        told = asdict(self)
        return told | {
            "engines": [
                each | {"communication_share": engine.share} for each, engine in zip(told["engines"], self.engines)
            ]
        }


def plan(question: Question) -> PlanReport:
    """By the model's config alone.

    Raises:
        CannotEstimate: no model can be made of the config, or it cannot be traced.
        MissingExtra, NoConfig: as `hollow_model` says.
        UnknownBudget: `memory` or `host_memory` cannot be read.
    """
    return MultiGpuPlanner(question).report()


class MultiGpuPlanner:
    """One question. A rehearsal for one engine serves the others where they choose from the same plans."""

    def __init__(self, question: Question):
        self.question, self.sheet = question, DatasheetGauge(question.gpu)
        self.model: nn.Module = hollow_model(question.model, question.mode, question.rank)
        self.parts: ModelBytes = parts_of(self.model)
        self.network = Network(question.gpu, question.gpus, question.per_node, question.network)
        self.rehearsals: dict[tuple, tuple[DryRunPlanner, list[str]]] = {}
        self.notes: dict[str, None] = {}
        self.flops = 0

    def report(self) -> PlanReport:
        asked = self.question
        engines = [self.one_gpu()]
        if asked.gpus > 1:
            engines += [self.ddp(), self.fsdp()] + ([self.device_map()] if len(self.parts.layers) > 1 else [])
        best, reason = recommended(engines, self.parts, self.network)
        return PlanReport(asked, engines, best, reason, self.flops, [*self.notes, *self._said()])

    def one_gpu(self) -> EnginePlan:
        return self._engine("one GPU", self.question.rows, whole(self.parts, self.sheet), 1)

    def ddp(self) -> EnginePlan:
        def cost(forward: float, backward: float) -> EngineCost:
            return ddp_cost(self.parts, self.network, backward)

        return self._engine("DDP", self._rows_each(), replicated(self.parts, self.sheet), self.question.gpus, cost)

    def fsdp(self) -> EnginePlan:
        def cost(forward: float, backward: float) -> EngineCost:
            return fsdp_cost(self.parts, self.network, forward, backward, self.question.gpu.rates.bandwidth)

        return self._engine(
            "FSDP2", self._rows_each(), sharded(self.parts, self.question.gpus, self.sheet), self.question.gpus, cost
        )

    def device_map(self) -> EnginePlan:
        """GPUs of one machine take turns: a step takes as long as on one, and hidden states are handed on."""
        made = self._in_turn(self.question.memory)
        return self._helped(made if made.fits or made.memory is not None else self._in_turn("auto"))

    def _in_turn(self, memory: Spec) -> EnginePlan:
        asked, gpus = self.question, min(self.question.gpus, self.question.per_node, len(self.parts.layers))
        rehearsal, notes = self._rehearsal(asked.rows, replace(whole(self.parts, self.sheet), spread=True), memory)
        self.notes |= dict.fromkeys(notes)
        room = rehearsal.allowed() - int(MARGIN * rehearsal.allowed())
        found = stages(self.parts, gpus, rehearsal, room)
        held = max(found, key=lambda stage: stage.peak)
        states = 2 * asked.rows * asked.length * self.model.get_input_embeddings().weight.shape[1]
        sent = 2 * (gpus - 1) * self.network.send(states)
        step = rehearsal.step_ms() - rehearsal.admitted.choice.ms + sum(stage.choice.ms for stage in found) + sent
        missing = max(0, held.peak - room)
        most = self._most(
            asked.rows,
            lambda rows: all(
                stage.choice.fits for stage in stages(self.parts, gpus, rehearsal, room, rows / asked.rows)
            ),
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
            _plans(rehearsal, found),
            memory,
            most,
        )

    def _rows_each(self) -> int:
        return self.question.rows // self.question.gpus if self.question.together else self.question.rows

    def _engine(
        self, name: str, rows: int, ledger: StaticMemory, gpus: int, cost=lambda forward, backward: EngineCost()
    ) -> EnginePlan:
        asked, memory = self.question, self.question.memory
        rehearsal, estimate = self._estimate(rows, ledger, memory)
        if memory is None and not estimate.fits:
            memory = "auto"
            rehearsal, estimate = self._estimate(rows, ledger, memory)
        forward, work = rehearsal.forward_ms(), rehearsal.admitted.choice.work
        added = cost(forward, work - forward)
        alone = estimate.milliseconds - (1 - 1 / gpus) * rehearsal.optimizer_ms() * ledger.sharded
        step = alone + added.exposed + added.copied
        most = self._most(rows, lambda n: rehearsal.holds(n * asked.length))
        return self._helped(
            EnginePlan(
                name,
                gpus,
                rows,
                bool(estimate.fits),
                estimate.missing,
                estimate.weights,
                gathered(self.parts) if ledger.sharded else 0,
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

    def _estimate(self, rows: int, ledger: StaticMemory, memory: Spec) -> tuple[DryRunPlanner, Estimate]:
        rehearsal, notes = self._rehearsal(rows, ledger, memory)
        self.notes |= dict.fromkeys(notes)
        estimate = read(type(self.model).__name__, (rows, self.question.length), ledger, rehearsal, notes)
        self.flops = estimate.flops
        return rehearsal, estimate

    def _rehearsal(self, rows: int, ledger: StaticMemory, memory: Spec) -> tuple[DryRunPlanner, list[str]]:
        key = (
            rows,
            memory,
            self.question.mode == "lora" and ledger.moves,
        )  # of the others, one rehearsal serves all engines
        if key not in self.rehearsals or not self.rehearsals[key][0].under(ledger):
            stage = stage_of(
                self.model, memory, HOST if self.question.host_memory is None else self.question.host_memory
            )
            with torch.autocast("cpu", torch.bfloat16):
                self.rehearsals[key] = rehearse(
                    stage, ledger, torch.device("meta"), (rows, self.question.length), self.question.gpu, thorough=True
                )
        return self.rehearsals[key]

    def _most(self, rows: int, fits) -> int:
        """The largest batch that fits, as a number of rows."""
        low, high = (rows, 2 * rows) if fits(rows) else (0, rows)
        while low == high // 2 and low and high < MOST and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _helped(self, made: EnginePlan) -> EnginePlan:
        """With what would help most, where it does not fit."""
        return made if made.fits else replace(made, help=self._help(made))

    def _help(self, made: EnginePlan) -> str:
        """First what leaves the training as it is: fewer rows, or more GPUs; then what trains less, or rounds its base."""
        asked = self.question
        found = [f"{made.most_rows} rows of {asked.length:,} tokens fit"] if made.most_rows else []
        if not found and (
            enough := next(
                (n for n in COUNTS if n >= asked.gpus + (made.engine == "FSDP2") and self._shares_fit(n, made)), None
            )
        ):
            found.append(f"FSDP2 over {enough} GPUs fits")
        smaller = {
            mode: self._with_mode(made, mode)
            for mode in {"full": ("lora", "qlora"), "lora": ("qlora",)}.get(asked.mode, ())
        }
        if mode := next(
            (mode for mode in smaller if made.peak - smaller[mode] >= made.missing),
            min(smaller, key=smaller.get, default=None),
        ):
            found.append(f"--{mode} needs {shown(made.peak - smaller[mode])} less")
        return ", or ".join(found or [f"rows of half the length need {shown(made.activations // 2)} less"])

    def _shares_fit(self, gpus: int, made: EnginePlan) -> bool:
        return sharded(self.parts, gpus, self.sheet).allocated() + made.activations <= made.allowed

    def _with_mode(self, made: EnginePlan, mode: str) -> int:
        """Bytes at the peak, were another part of the model trained, or its base in four bits. Activations are taken to stay."""
        parts = parts_of(hollow_model(self.question.model, mode, self.question.rank))
        ledger = {"DDP": replicated, "one GPU": whole, "device_map": whole}.get(made.engine)
        held = sharded(parts, made.gpus, self.sheet) if ledger is None else ledger(parts, self.sheet)
        share = made.gpus if made.engine == "device_map" else 1
        return held.allocated() // share + made.activations

    def _said(self) -> list[str]:
        gpu, asked = self.question.gpu, self.question
        return [
            *(
                []
                if gpu.measured
                else [
                    f"no {gpu.title} was measured: its kernels are taken to reach the shares of the datasheet that an H200's reach"
                ]
            ),
            *(["full: weights in bf16, two moments of each in fp32"] if asked.mode == "full" else []),
            *(
                ["FSDP2 shards floats only: 4-bit weights under it need bnb_4bit_quant_storage=torch.bfloat16"]
                if asked.mode == "qlora" and asked.gpus > 1
                else []
            ),
            *(
                [
                    "communication is modelled, not measured: rings at the links' bandwidth, hidden behind computation where engines overlap them"
                ]
                if asked.gpus > 1
                else []
            ),
        ]


def _plans(rehearsal: DryRunPlanner, found: list[PipelineStage]) -> list[dict[str, Any]]:
    """What so many layers do, of all stages."""
    return rehearsal.described(
        [(rehearsal.layers[0], option) for stage in found for options in stage.choice.options for option in options]
    )


def recommended(engines: list[EnginePlan], parts: ModelBytes, network: Network) -> tuple[str | None, str]:
    """The fastest that fits; of those within `SAME`, the simplest, which come first. Returns its name and why, in a sentence."""
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
        "one GPU": "it is as fast as the others, and nothing is sent",
        "DDP": f"every GPU holds the whole model, and only {shown(parts.all.gradients)} of gradients are sent, {best.exposed_ms:.1f} ms of a step not hidden",
        "FSDP2": f"each GPU holds a share and gathers layers, {best.exposed_ms:.1f} ms of a step not hidden",
        "device_map": "GPUs take turns, but no other engine fits",
    }[best.engine]
    others = [engine for engine in fine if engine is not best]
    if others and best.engine != "one GPU":
        second = max(others, key=lambda engine: engine.tokens_per_s)
        why += f"; {second.engine} gives {second.tokens_per_s:,.0f} tokens/s"
    missing = [f"{engine.engine} lacks {shown(engine.missing)}" for engine in engines if not engine.fits]
    return "; ".join([why, *missing])
