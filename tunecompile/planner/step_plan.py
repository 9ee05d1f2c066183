"""The plan of a whole training step: a pure function of what layers may choose from and of what their device holds.

`RuntimePlanner` solves it before a step runs, and `DryRunPlanner` for a step that will not run. Both only gather the
numbers of a `StepRequest`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from tunecompile.planner.candidates import CandidateCost, options
from tunecompile.planner.hardware import Rates
from tunecompile.planner.recorded import RecordedStep, recorded_step
from tunecompile.planner.solver import KEEP, KEEP_WEIGHTS, Assignment, LayerRun, Plan, PlanOption, choose, peak

#: of the room, for a plan that leaves some of it to recordings
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
#: times what a step needs is left to it where frozen weights stay dequantised, which takes far more than CUDA graphs do
#: and saves less
ROOMY = 1.5


@dataclass(frozen=True)
class RegionCandidates:
    """The plans that one region's layers may follow, surveyed on a batch of so many tokens."""

    rows: tuple[CandidateCost, ...]
    tokens: int
    names: tuple[str, ...] = ()  #: of the values that plans call by number
    weights: int = 0  #: bytes that a layer's frozen weights take in the layout that products read
    whole: bool = False  #: whether every plan was surveyed
    attention: float | None = None  #: its floating point operations a millisecond, where it was timed
    passed: int = 0  #: bytes of what a layer gives the next one
    longest: int = 0  #: tokens of the longest document, where its attention is one to documents
    window: int = 0  #: tokens that it sees; 0 for all

    def seen(self, window: int) -> int:
        """Tokens that attention sees with such a window, 0 for none; 0 where it is not one to documents."""
        return min(self.longest, window or self.longest)

    def seeing(self, window: int) -> RegionCandidates:
        """Those of layers with the same code whose attention has another window, in tokens; 0 for none."""
        seen, here = self.seen(window), self.seen(self.window)
        if seen == here:
            return self
        rows = (
            replace(
                row,
                forward_work=row.forward_work.attending(seen / here),
                backward_work=row.backward_work.attending(seen / here),
            )
            for row in self.rows
        )
        return replace(self, rows=tuple(rows), window=window, attention=None)  # timed at other sizes

    def rates(self, machine: Rates) -> Rates:
        """The machine's, with this region's attention."""
        return replace(machine, attention=self.attention) if self.attention else machine


@dataclass(frozen=True)
class RegionRun:
    """Consecutive layers of one region."""

    region: int  #: its key among the candidates
    layers: int
    window: int = 0  #: tokens that their attention sees, by their attributes; 0 for all
    gradients: int = 0  #: bytes that the backward of each of these layers brings and leaves
    only: Plan | None = None  #: the plan that they follow, whether it fits or not


@dataclass(frozen=True)
class StepRequest:
    """What a plan is made from: one step's layers and the memory of their device, in bytes."""

    tokens: int  #: of the batch
    runs: tuple[RegionRun, ...]  #: in running order
    candidates: Mapping[int, RegionCandidates]  #: by region; at least one
    rates: Rates
    available: int  #: that tensors may take, without the allocator's margin
    resident: int  #: that are there whatever layers do, and gradients that backwards bring
    tail: int  #: that head and loss need while all layers hold theirs
    host: int | None = None  #: that may go to the host; None for any number
    ceiling: int | None = None  #: for layers, head and loss, as another rank found; None for what is available
    offload: bool = False  #: whether anything may go to the host
    all_seen: bool = True  #: whether each region was surveyed, or has had its step without showing a backward
    keeps_weights: bool = False  #: whether frozen weights may stay dequantised
    saving: float = 0.0  #: milliseconds of the step's forwards that CUDA graphs of all layers save, as far as is known
    records: bool = False  #: whether layers may be recorded as CUDA graphs
    #: whether the budget is that of checkpoints: what these would need at the largest batch, and no less than `floor`
    checkpointed: bool = False
    most: int = 0  #: tokens of the largest batch that may come, as far as is known
    floor: int = 0  #: bytes that layers, head and loss may take then, however little checkpoints need
    spare: int = 0  #: bytes that CUDA graphs may take then, beside what checkpoints would
    summed: int = 0  #: bytes beside all gradients at the step's end, while those of head and embedding are added up
    #: by layer, in running order: what it holds in this step already, whatever the plan is; None for all others
    ran: tuple[PlanOption | None, ...] = ()

    def layers(self) -> list[RegionCandidates]:
        """Each layer's candidates, in running order.

        A region without any is taken to be like the first that has some.
        """
        return [each for run, each in self._runs() for _ in range(run.layers)]

    def _runs(self) -> list[tuple[RegionRun, RegionCandidates]]:
        """Runs and their candidates. Layers with windows that hold the longest document make one run with those beside
        them that see all.
        """
        known = next(iter(self.candidates.values()))
        found: list[tuple[RegionRun, RegionCandidates]] = []
        for run in self.runs:
            each = self.candidates.get(run.region, known)
            run = replace(run, window=each.seen(run.window))
            if found and replace(found[-1][0], layers=run.layers) == run:
                run = replace(run, layers=found.pop()[0].layers + run.layers)
            found.append((run, each.seeing(run.window)))
        return found

    def layer_runs(self) -> list[LayerRun]:
        """The options of each run of layers. A region that was seen and shows no backward holds nothing."""
        found = []
        for run, each in self._runs():
            if run.region not in self.candidates and self.all_seen:
                found.append(LayerRun(run.layers, (PlanOption(KEEP, 0, 0, 0, 0.0),)))
                continue
            choices = options(
                each.rows, self.tokens / each.tokens, each.rates(self.rates), self.offload and len(each.rows) > 1
            )
            allowed = (option for option in choices if run.only is None or option.plan == run.only)
            more = {"gradients": run.gradients, "passed": int(each.passed * self.tokens / each.tokens)}
            found.append(LayerRun(run.layers, tuple(replace(o, kind=run.region, **more) for o in allowed)))
        return following(found, self.ran)

    def beside_layers(self, runs: Sequence[LayerRun]) -> int:
        """Bytes that are there whatever layers do, while their gradients are not."""
        return self.resident - _gradients(runs)

    def last(self, runs: Sequence[LayerRun]) -> int:
        """Bytes that the step's end needs beside what is resident, whatever layers do: all gradients are there."""
        return self.summed + _gradients(runs)

    def checkpointed_peak(self) -> int:
        """Bytes of layers, head and loss under checkpoints around each layer, at the largest batch that may come.

        A layer holds what the one before it gave, and in its backward all that it saves is there once more. Layers run
        by their own code save more than that.
        """
        known = next(iter(self.candidates.values()))
        order = []
        for run in self.runs:
            each = self.candidates.get(run.region, known)
            scale = max(self.tokens, self.most) / each.tokens
            kept = next(row for row in each.rows if row.plan == KEEP)
            saved = max(0, kept.returned - each.passed)
            held, forward, backward = (
                int(nbytes * scale) for nbytes in (each.passed, kept.forward, saved + kept.backward)
            )
            order.append([PlanOption(KEEP, held, forward, backward, 0.0, gradients=run.gradients)] * run.layers)
        return peak(order, self.tail)


def following(runs: Sequence[LayerRun], ran: Sequence[PlanOption | None]) -> list[LayerRun]:
    """Runs of layers of which some have one option only: theirs in `ran`, by layer."""
    if not any(ran):
        return list(runs)
    choices = [run.options for run in runs for _ in range(run.layers)]
    fixed = (choice if one is None else (_on_its_own(one),) for choice, one in zip(choices, ran))
    together = groupby(fixed, key=lambda choice: (choice[0].kind, choice))
    return [LayerRun(len(list(same)), choice) for (_, choice), same in together]


def _on_its_own(option: PlanOption) -> PlanOption:
    """Weights stay dequantised for all layers, or for none."""
    return replace(option, plan=KEEP) if option.plan == KEEP_WEIGHTS else option


def _gradients(runs: Sequence[LayerRun]) -> int:
    """Bytes of gradients that the layers' backwards bring."""
    return sum(run.layers * run.options[0].gradients for run in runs)


@dataclass(frozen=True)
class AdmittedPlan:
    """A plan for each layer, and the batch and bytes that it was made for."""

    tokens: int  #: of the batch
    resident: int  #: bytes that are there whatever layers do
    room: int  #: bytes for layers, head and loss
    choice: Assignment
    weights: int  #: bytes of frozen weights kept dequantised
    seen: bool  #: whether every layer's graph was known, or has no backward
    saving: float  #: milliseconds a step's forwards that CUDA graphs save, as far as was known
    #: whether no plan was known that leaves room for all CUDA graphs, or that offloads nothing under checkpoints
    short: bool
    recorded: RecordedStep  #: what the step takes with all layers recorded, if nothing goes to the host
    spare: int = 0  #: bytes that CUDA graphs may take beside the room
    for_one_step: bool = False  #: whether it bends to layers that ran before it was made, as in no later step

    @property
    def peak(self) -> int:
        """Predicted, of all tensors."""
        return self.resident + self.weights + self.choice.peak

    @property
    def limit(self) -> int:
        """Of all tensors, where the budget is that of checkpoints."""
        return self.resident + self.room

    @property
    def records_all(self) -> bool:
        """Whether there is room for CUDA graphs of all layers."""
        return not self.choice.offloads and self.recorded.bytes <= self.room + self.spare - self.weights

    def outlives(self, gained: int, checkpointed: bool) -> bool:
        """Whether it is still the plan to follow when others gave memory back, or took some.

        Args:
            gained: bytes that are there beside those it was made with; below 0, fewer.
            checkpointed: whether the budget is what checkpoints need, which is no more for that.
        """
        if gained < 0:
            return self.choice.peak + self.weights <= self.room + gained
        return self.choice.ms == 0 or (checkpointed and self.choice.fits)

    def settles(self, surveyed: Iterable[RegionCandidates]) -> bool:
        """Whether no more plans have to be surveyed.

        Where CUDA graphs lack room, or a plan under checkpoints offloads, the next stage may have a better one.
        """
        return self.choice.fits and not (self.short and any(not found.whole for found in surveyed))


def solve(request: StepRequest) -> AdmittedPlan:
    """The fastest plan that fits, or the smallest where none does.

    Args:
        request: layers, their candidates and the device's bytes.

    Returns:
        A plan for each layer. Where all layers keep everything and there is room beside, frozen weights stay
        dequantised, too.
    """
    runs = request.layer_runs()
    resident = request.beside_layers(runs)
    room = request.available - resident
    room = room if request.ceiling is None else min(room, request.ceiling)
    last, spare = request.last(runs), 0
    if request.checkpointed:
        whole, room = room, min(room, max(request.checkpointed_peak(), request.floor, last))
        spare = min(request.spare, whole - room)
    gain = 2 * request.saving  # as much in backwards
    choice, short = leave_room_for_graphs(_fastest(request, runs, room), runs, room, request.tail, gain, spare)
    short |= request.checkpointed and choice.offloads
    if last > choice.peak:
        choice = replace(choice, peak=last, fits=choice.fits and last <= room)
    recorded = recorded_step(choice.options, request.tail)
    weights = _kept_weights(request, choice, room - int((ROOMY if request.records else 1) * choice.peak))
    if weights:
        kept = tuple(tuple(replace(option, plan=KEEP_WEIGHTS) for option in run) for run in choice.options)
        choice = replace(choice, options=kept)
    return AdmittedPlan(
        request.tokens, resident, room, choice, weights, request.all_seen, request.saving, short, recorded, spare
    )


def _fastest(request: StepRequest, runs: Sequence[LayerRun], room: int) -> Assignment:
    """The fastest plan that fits. Under checkpoints that is one that offloads nothing, as theirs does not."""
    if request.checkpointed:
        staying = choose([run.offloading_at_most(0) for run in runs], room, request.tail)
        if staying.fits:
            return staying
    return choose(runs, room, request.tail, request.host)


def solve_from_here(request: StepRequest, ran: Sequence[PlanOption | None]) -> AdmittedPlan:
    """The plan to follow from the middle of a step on: `solve`'s, unless this step would not fit under it.

    Layers of another kind are surveyed when the first of them runs. Those before it followed a plan that did not know
    that kind, and hold what it told them to, on the device and on the host.

    Args:
        request: of the whole step.
        ran: what layers hold already, by layer, in running order; None for those that are to run.
    """
    made = solve(request)
    if not any(ran):
        return made
    planned = [option for run in made.choice.options for option in run]
    mixed = [now or then for now, then in zip(ran, planned)]
    waiting = sum(option.offloaded for option in mixed)
    fits = peak([mixed], request.tail, made.choice.ahead) <= max(made.room, made.choice.peak)
    if fits and (request.host is None or waiting <= request.host):
        return made
    return replace(solve(replace(request, ran=tuple(ran))), for_one_step=True)


def leave_room_for_graphs(
    choice: Assignment, runs: Sequence[LayerRun], room: int, tail: int, gain: float, spare: int = 0
) -> tuple[Assignment, bool]:
    """Of this choice and others, the one whose step is shortest with CUDA graphs.

    A plan that just fits leaves no room for recordings, and layers that are offloaded are not recorded. Where they are
    launch-bound, a plan that holds less and computes more may be faster.

    Args:
        choice: the fastest that fits without recordings.
        runs, room, tail: what it was chosen from, as for `choose`.
        gain: milliseconds a step that recording all layers saves.
        spare: bytes that recordings may take beside the room.

    Returns:
        The choice, and whether no plan is known that leaves room for all recordings.
    """

    def recorded(made: Assignment) -> float:
        found = recorded_step(made.options, tail)
        return 0.0 if made.offloads else found.share(room + spare, made.peak)

    if not choice.fits or gain <= 0 or recorded(choice) == 1:
        return choice, False
    others = [found for found in _staying(runs, room, tail) if found.fits]
    short = not any(recorded(found) == 1 for found in others)
    return min([choice, *others], key=lambda made: made.ms - gain * recorded(made)), short


def _staying(runs: Sequence[LayerRun], room: int, tail: int) -> list[Assignment]:
    """Assignments that offload nothing: a graph's saved tensors lie in its own memory, which stays on the device.

    Beside the fastest in several rooms there are those with one plan for all layers, whose recordings have scratch in
    one place.
    """
    staying = [run.offloading_at_most(0) for run in runs]
    found = [choose(staying, int(share * room), tail) for share in SHARES]
    for plan in dict.fromkeys(option.plan for run in staying for option in run.options):
        each = tuple(
            (next((o for o in run.options if o.plan == plan), min(run.options, key=lambda o: o.ms)),) * run.layers
            for run in staying
        )
        needed = peak(each, tail)
        found.append(Assignment(each, needed, needed <= room))
    return found


def _kept_weights(request: StepRequest, choice: Assignment, left: int) -> int:
    """Bytes of all layers' frozen weights, if they are dequantised once for all steps; 0 if not."""
    needed = sum(
        run.layers * request.candidates[run.region].weights for run in request.runs if run.region in request.candidates
    )
    plain = all(o.plan == KEEP and not o.offloaded for run in choice.options for o in run)
    return needed if request.keeps_weights and request.all_seen and plain and needed <= left else 0


def recomputed_names(plan: Plan, names: Sequence[str]) -> tuple[str, ...]:
    """What a layer recomputes under a plan. names: of the values that plans call by number."""
    if plan.recompute is None:
        return ("everything", "attention") if plan.attention else ("everything",)
    return tuple(names[i] for i in sorted(plan.recompute) if i < len(names))


def count_options(chosen: Iterable[tuple[PlanOption, Sequence[str]]]) -> list[dict[str, Any]]:
    """How many layers follow each plan, for the report. chosen: a layer each, its option and its region's names."""
    counts = Counter(
        (
            recomputed_names(option.plan, names),
            option.plan.tiles,
            option.offloaded > 0,
            bool(option.offloaded and option.held),
        )
        for option, names in chosen
    )
    return [
        {"recompute": list(again), "tiles": tiles, "offload": offload, "largest_stays": stays, "layers": count}
        for (again, tiles, offload, stays), count in counts.items()
    ]
