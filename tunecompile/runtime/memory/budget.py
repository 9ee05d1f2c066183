"""The plan of one model: made when its first layer's graph is known, looked at again at every step, made anew when the batch outgrows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph

from tunecompile.compiler.weight_layout import growth, matrix_bytes
from tunecompile.integrations.fsdp import Shards
from tunecompile.planner import candidates
from tunecompile.planner.cost_model import Work, beside_layers
from tunecompile.planner.device_memory import MARGIN, shown
from tunecompile.planner.hardware import Rates, measure_rates
from tunecompile.planner.solver import KEEP, KEEP_WEIGHTS, RECOMPUTE, Assignment, LayerRun, Plan, PlanOption, choose
from tunecompile.runtime.memory.accounting import MemoryAccounting
from tunecompile.runtime.memory.graph_allowance import RECORDED
from tunecompile.runtime.memory.timeline_trace import MemoryTrace

SHRUNK = 0.75  #: tokens by those of a plan that costs time, down to which it is kept
GROWN = 1.02  #: resident bytes by those at the last plan, from which on the plan is looked at again


@dataclass(frozen=True)
class RegionCandidates:
    """What one region's layers may choose from, surveyed on a batch of so many tokens."""

    rows: tuple[candidates.CandidateCost, ...]
    tokens: int
    names: tuple[str, ...] = ()  #: of the values that plans call by number
    weights: int = 0  #: bytes a layer's frozen weights take as products read them
    whole: bool = False  #: whether there is no more to survey
    attention: float | None = None  #: its floating point operations a millisecond, where it was timed


@dataclass(frozen=True)
class AdmittedPlan:
    """What a plan was made for: tokens, bytes that are there anyway, bytes it may use for layers, head and loss."""

    tokens: int
    resident: int
    room: int
    choice: Assignment
    weights: int = 0  #: bytes of frozen weights kept dequantised
    seen: bool = True  #: whether every layer's graph was known, or has no backward
    launching: float = 0.0  #: milliseconds a step that launches took, as far as was known

    @property
    def peak(self) -> int:
        """Predicted, of all tensors."""
        return self.resident + self.weights + self.choice.peak


@dataclass
class RuntimePlanner(MemoryAccounting):
    """Gives every layer its plan, within the bytes the user allows."""

    menus: dict[int, RegionCandidates] = field(default_factory=dict)
    options: dict[int, PlanOption] = field(default_factory=dict)
    admitted: AdmittedPlan | None = None
    running: Any = None
    tokens: int = (
        0  #: of the step's first layer, which stand for the whole batch (a decoder may run on fewer than its encoder)
    )
    highest: int = 0  #: the device's peak when last looked at
    measured: int = 0  #: the last peak that was a step's
    asked: bool = False
    exceeded: bool = False
    began: int = 0  #: the step in which all layers' graphs were seen, or will be
    plans: int = 0
    pressed: bool = False  #: whether a device was full under a plan, so that less than the budget is there
    shortfall: str | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.places = {id(slot): place for place, slot in enumerate(self.layers)}
        self.offloading = False
        self.trace = MemoryTrace(self.gauge)
        self.speed = Rates(float("inf"), float("inf"))  #: not known before the first plan

    def forget_step(self) -> None:
        """What the device held since the last step was not the training's."""
        self.gauge.release()
        self.gauge.forget_peak()
        self.highest, self.steps = self.gauge.peak()[0], 0

    def begin(self) -> None:
        """At the model's entry: look at what the last step needed."""
        self.asked = False
        self.steps += 1
        if self.offload is not None:
            self.offload.begin_step()
        peak, held = self.gauge.peak()
        if self.admitted is None:
            self.highest = peak  # of loading the model, say
        elif (
            peak != self.highest and peak - self.gauge.allocated() > self.admitted.choice.peak // 2
        ):  # a step's: nobody reset the count since
            self.measured, self.highest = peak, peak
            self.surplus += max(0, peak - self.admitted.peak - self.recordings.bytes)
            self.slack = max(self.slack, held - peak)
            self.exceeded = held > self.allowed()

    def step_ms(self) -> float | None:
        """Predicted milliseconds of a step under the plan, with AdamW and without data loading; None on a CPU, whose speed is another for every kernel."""
        if self.admitted is None or not self.speed.launches:
            return None
        return self.admitted.choice.work + self._beside_layers(self.admitted.tokens).ms(self.speed)

    def _beside_layers(self, tokens: int) -> Work:
        trained = [
            rest for p in self.model.parameters() if p.requires_grad and self._is_here(rest := self.shards.at_rest(p))
        ]
        return beside_layers(self._heads(), trained, tokens)

    def _layers_menus(self) -> list[RegionCandidates]:
        """Each layer's; of those that nobody has surveyed yet, another's."""
        known = next(iter(self.menus.values()))
        return [self.menus.get(id(slot.region), known) for slot in self.layers]

    def _surveyed(self) -> list[RegionCandidates]:
        """Of layers on this device; others' are surveyed where they are."""
        return [
            self.menus[region]
            for region in dict.fromkeys(id(slot.region) for slot in self.layers)
            if region in self.menus
        ]

    def option(self, slot: Any, tokens: int) -> PlanOption | None:
        """What this layer does in this step; None where its graph has to be seen first."""
        place = self.places[id(slot)]
        if not self.asked:  # once a step, at its first layer
            self.asked, self.tokens, self.present, self.moving = True, tokens, self.gauge.allocated(), {}
            self.began = self.began or self.steps
            self._review(tokens)
            self.trace.begin(self.steps, self.admitted and self.admitted.choice.options, tokens)
        self.trace.note("forward", place)
        self.running = slot
        return self.options.get(id(slot))

    def around(self, slot: Any) -> AbstractContextManager:
        """A layer's call: what it saves goes to the host, where its plan says so. (The plan of the very first is made inside.)"""
        if self.offload is None or not (self.offloading or id(slot) not in self.options):
            return nullcontext()
        return self.offload.layer(self.places[id(slot)], slot.layer, partial(self._leaves, slot))

    def _leaves(self, slot: Any, saved: torch.Tensor) -> bool:
        """Whether it goes to the host. The batch may be larger than the one that the plan was made for: bytes are taken as they were then."""
        if (option := self.options.get(id(slot))) is None:
            return False
        return option.offloads_tensor(
            saved.untyped_storage().nbytes() * self.admitted.tokens // max(self.tokens, self.admitted.tokens)
        )

    def ran(self, slot: Any, output: Any) -> None:
        """After a layer's forward."""
        self.trace.follow(output, self.places[id(slot)])

    def settle(self) -> None:
        """Before head and loss, whose memory may be the peak."""
        if self.offload is not None:
            self.offload.settle()
        self.trace.note("tail")

    def decide(self, graph: Graph, cut: candidates.Cut, attention: float | None = None) -> Plan:
        """Inside the compilation of the running layer: survey its graph and plan for all layers. attention: as in its `RegionCandidates`."""
        region, tokens = id(self.running.region), self.tokens
        before = self.menus.get(region)
        try:
            weights = matrix_bytes(graph) if self.kept is not None else 0
            self.moving[region] = growth(graph) if self.moves else 0
            rows, names = [], tuple(map(candidates.describe, candidates.expensive_nodes(graph)))
            for plans in candidates.candidate_stages(graph):
                rows += candidates.survey(cut, plans)
                self.menus[region] = RegionCandidates(tuple(rows), tokens, names, weights, attention=attention)
                self._admit(tokens)
                if self._satisfied():
                    break
            else:
                self.menus[region] = replace(self.menus[region], whole=True)
        except Exception as error:  # the step goes on with what was surveyed before, or without a plan
            known = max(filter(None, (before, self.menus.get(region))), key=lambda found: len(found.rows), default=None)
            missing = "no memory plan" if known is None else "not all memory plans"
            self._note_failure(f"{missing} for {self.running.region.name}", error)
            if known is None:
                return self._without()
            self.menus[region] = replace(known, whole=True)  # it would fail again
            self._admit(tokens)
        if self.offloading:  # code is generated next, in which nothing else happens
            self.offload.expect(self.admitted.choice.waiting)
        return self.options[id(self.running)].plan

    def _note_failure(self, missing: str, error: Exception) -> None:
        note = f"{missing}: {type(error).__name__}: {str(error)[:200]}"
        self.notes += [note] if note not in self.notes else []

    def retreat(self, missing: int | None) -> bool:
        """The device was full: plan for less by so many bytes (None: for as little as possible), now and from here on. False where
        there is no smaller plan."""
        made = self.admitted
        if made is None or not self.menus:
            return False
        self.highest = self.gauge.peak()[0]  # of a plan that is given up
        target = (
            0 if missing is None else min(made.choice.peak, made.room) - max(missing, int(MARGIN * made.choice.peak))
        )
        self.surplus += max(0, self._own_room(self._resident(self._stacks(self.tokens)[0])) - target)
        return self._make_smaller()

    def give_way(self, room: int) -> bool:
        """Another rank ran out of memory, and plans with so many bytes for layers, head and loss from here on: so does this one, if it has more. Whether
        that takes another plan."""
        self.ceiling = room if self.ceiling is None else min(room, self.ceiling)
        return (
            self.admitted is not None
            and bool(self.menus)
            and self.admitted.choice.peak > self.ceiling
            and self._make_smaller()
        )

    def _make_smaller(self) -> bool:
        before = self.admitted.choice.peak
        self.pressed = True
        self._admit(self.tokens)
        if self.admitted.choice.fits or not self._survey_again():
            return self.admitted.choice.peak < before
        return True

    @property
    def tight(self) -> bool:
        """Whether layers need more than half of what there is for them, as far as is known."""
        return self.admitted is None or 2 * self.admitted.choice.peak > self.admitted.room

    def _without(self) -> Plan:
        """For layers there is nothing to plan with: what the user asked for."""
        for slot in self.layers:
            self.options.setdefault(id(slot), PlanOption(RECOMPUTE if slot.checkpoint else KEEP, 0, 0, 0, 0.0))
        return self.options[id(self.running)].plan

    def _review(self, tokens: int) -> None:
        """Before a step's first layer."""
        if self.admitted is not None and (self.exceeded or tokens != self.admitted.tokens):
            made = self.admitted
            if self.recordings.make_way(
                made.choice.peak * tokens // made.tokens, 0 if self.exceeded else made.room - made.weights
            ):
                self.gauge.release()
        if not self.menus or (self.admitted is not None and self._still_serves(tokens) and self._finished()):
            return
        try:
            self._admit(tokens)
        except Exception as error:
            if self.admitted is not None:
                raise
            self._note_failure(
                "no memory plan", error
            )  # layers of this kind are on another device, too, and have menus by now
            return
        if not self._satisfied():
            self._survey_again()

    def _satisfied(self) -> bool:
        """Whether no more plans have to be surveyed."""
        seeking = self.recordings.short and any(
            len(found.rows) == 1 for found in self._surveyed()
        )  # the next course may leave them room
        return self.admitted.choice.fits and not seeking

    def _finished(self) -> bool:
        """Whether the plan was made with all that there is to know: every kind of layer has been seen, and all their plans where none fits."""
        guessed = not self.admitted.seen and self.steps > self.began
        return not guessed and (self._satisfied() or all(found.whole for found in self._surveyed()))

    def _all_seen(self) -> bool:
        """Whether each kind of layer was surveyed, or has had its step without showing a backward."""
        return self.steps > self.began or all(id(slot.region) in self.menus for slot in self.layers)

    def _survey_again(self) -> bool:
        """Where not every plan there is was surveyed, the layers' graphs have to be seen once more."""
        again = any(not found.whole for found in self._surveyed())
        if again:
            self.options.clear()
            self.began = self.steps
        return again

    def _still_serves(self, tokens: int) -> bool:
        """Whether the plan there is does for this batch: batches differ from step to step, and a plan for each would compile without end."""
        made = self.admitted
        if self.exceeded or self.others() > GROWN * made.resident:
            return False
        if RECORDED * made.choice.peak > made.room and not made.launching and self.recordings.look():
            return False  # now it is known what launches cost
        if tokens > made.tokens:
            return made.choice.peak * tokens <= (made.room - made.weights) * made.tokens
        return tokens >= SHRUNK * made.tokens or not any(
            o.offloaded or o.plan not in (KEEP, KEEP_WEIGHTS) for options in made.choice.options for o in options
        )

    def _admit(self, tokens: int) -> None:
        if self.admitted is None or self.exceeded:
            self.gauge.release()
        self.exceeded = False
        stacks, slots = self._stacks(tokens)
        resident = self._resident(stacks)
        room = self._room(resident)
        tail = self.tail(tokens)
        choice = self.recordings.weigh(
            choose(stacks, room, tail, self.host_bytes()), stacks, room, tail, self._computing(tokens)
        )
        choice, weights = self._keep_weights(
            choice, slots, room - int((RECORDED if self.recordings.made else 1) * choice.peak)
        )
        self.recordings.allow(choice, room - weights)
        self.admitted = AdmittedPlan(
            tokens, resident, room, choice, weights, self._all_seen(), self.recordings.launching
        )
        self.plans += 1
        self.shortfall = None
        self.offloading = choice.offloads
        if self.offload is not None:
            self.offload.ahead = choice.ahead
        self.options = {
            id(slot): option
            for layers, options in zip(slots, choice.options)
            for slot, option in zip(layers, options)
            if id(slot.region) in self.menus
        }
        if not choice.fits and not self.pressed:
            self._note_shortfall(choice.peak - room)

    def _computing(self, tokens: int) -> float:
        """Milliseconds of all layers' forwards."""
        if not self.recordings.look():
            return 0.0
        return sum(each.rows[0].forward_work.ms(self._rates_of(each), tokens / each.tokens) for each in self._layers_menus())

    def _keep_weights(self, choice: Assignment, slots: list[list[Any]], left: int) -> tuple[Assignment, int]:
        """Where there is room for all layers' frozen weights beside all else, they are dequantised once for all steps."""
        needed = sum(
            self.menus[id(slot.region)].weights for layers in slots for slot in layers if id(slot.region) in self.menus
        )
        kept = self._all_seen() and all(
            option.plan == KEEP and not option.offloaded for options in choice.options for option in options
        )
        if self.kept is None or not needed or not kept or needed > left:
            if self.kept is not None and self.kept.matrices:
                self.kept.release()
                if self.replays is not None:
                    self.replays.forget()  # recordings point at them
            return choice, 0
        options = tuple(tuple(replace(option, plan=KEEP_WEIGHTS) for option in options) for options in choice.options)
        return replace(choice, options=options), needed

    def _stacks(self, tokens: int) -> tuple[list[LayerRun], list[list[Any]]]:
        """Layers of one region after another's are a stack. A region nobody has surveyed yet is taken for one that was, until a whole step has
        passed: then none of its graphs has a backward, and its layers hold nothing."""
        known = next(iter(self.menus.values()))
        slots: list[list[Any]] = []
        for slot in self.layers:
            if not slots or slots[-1][-1].region is not slot.region:
                slots.append([])
            slots[-1].append(slot)
        self.shards = Shards(self.model)
        self.speed = self._rates()  # while there is memory to measure with: it may be needed when there is none
        stacks = []
        for layers in slots:
            if id(layers[0].region) not in self.menus and self._all_seen():
                stacks.append(LayerRun(len(layers), (PlanOption(KEEP, 0, 0, 0, 0.0),)))
                continue
            found = self.menus.get(id(layers[0].region), known)
            options, coming = (
                candidates.options(
                    found.rows,
                    tokens / found.tokens,
                    self._rates_of(found),
                    self.offload is not None and len(found.rows) > 1,
                ),
                self._coming(layers),
            )
            stacks.append(LayerRun(len(layers), tuple(replace(option, gradients=coming) for option in options)))
        return stacks, slots

    def _rates(self) -> Rates:
        return measure_rates(self.device, self._dtype())

    def _dtype(self) -> torch.dtype:
        return (
            torch.get_autocast_dtype(self.device.type)
            if torch.is_autocast_enabled(self.device.type)
            else torch.bfloat16
            if self.device.type == "cuda"
            else torch.float32
        )

    def _rates_of(self, found: RegionCandidates) -> Rates:
        speed = self._rates()
        return replace(speed, attention=found.attention) if found.attention else speed

    def _note_shortfall(self, missing: int) -> None:
        self.shortfall = f"the smallest plan for {self.admitted.tokens} tokens needs {shown(missing)} more than memory={self.spec!r} allows: it is run all the same"

    def said(self) -> list[str]:
        """For the report."""
        return self.notes + ([self.shortfall] if self.shortfall else [])

    def summary(self) -> dict[str, Any] | None:
        """For the report: device, budget, predicted and measured peak (bytes), the step's predicted milliseconds, and how many layers follow each plan."""
        if self.admitted is None:
            return None
        return {
            "device": str(self.device),
            "budget": self.allowed(),
            "predicted_peak": self.admitted.peak,
            "measured_peak": self.measured or None,
            "tokens": self.admitted.tokens,
            "predicted_ms": self.step_ms(),
            "recompute_ms": self.admitted.choice.ms,
            "replans": self.plans,
            "kept_weights": self.admitted.weights,
            "offload": self.offload.report() if self.offloading else None,
            "plans": self.plans_by_layer(),
        }

    def plans_by_layer(self) -> list[dict[str, Any]]:
        """What so many layers do."""
        return self.described([(slot, option) for slot in self.layers if (option := self.options.get(id(slot)))])

    def described(self, options: Sequence[tuple[Any, PlanOption]]) -> list[dict[str, Any]]:
        """How many of these (slot, option) do what."""
        counts = Counter(
            (
                self.again(slot, option.plan),
                option.plan.tiles,
                option.offloaded > 0,
                bool(option.offloaded and option.held),
            )
            for slot, option in options
        )
        return [
            {"recompute": list(again), "tiles": tiles, "offload": offload, "largest_stays": stays, "layers": count}
            for (again, tiles, offload, stays), count in counts.items()
        ]

    def again(self, slot: Any, plan: Plan) -> tuple[str, ...]:
        """What a layer computes again, by name."""
        if plan.recompute is None:
            return ("everything", "attention") if plan.attention else ("everything",)
        names = self.menus[id(slot.region)].names if id(slot.region) in self.menus else ()
        return tuple(names[i] for i in sorted(plan.recompute) if i < len(names))
