"""Out of memory under a budget: layers drop their graphs, recompute them later, and the step goes on.

A layer's own graph can be dropped at any time, and made again from the layer's arguments
(tunecompile/runtime/memory/recompute_call.py). When a device is full, all layers on it drop their graphs, its budget
makes a plan that needs less, and only the failed part runs again: the forward of the module that owns the layers, head
and loss, or one layer's backward. Layers without a graph recompute it when their backward comes, from the same
arguments, random state and autocast, as a checkpoint would.

A layer that FSDP2 gathers is repeated between its hooks, where it is whole and nothing is sent
(tunecompile/integrations/fsdp.py). In the forward it is repeated by itself: the module that owns the layers would
gather them all again, which no rank can do alone. The other ranks wait in their next collective.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from tunecompile._torch.autograd import saving_is_taken
from tunecompile._torch.cuda import full_gpu, requested
from tunecompile._torch.distributed import sharded
from tunecompile.errors import NothingFits, RankLost, StepLost
from tunecompile.integrations.context_parallel import is_shared
from tunecompile.integrations.fsdp import gathers_inside
from tunecompile.integrations.rank_store import RankStore
from tunecompile.notes import Note, note
from tunecompile.planner.device_memory import shown
from tunecompile.planner.solver import describe_plan
from tunecompile.runtime.memory.across_ranks import RankPlans
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.recompute_call import NewGraph, NotExact, RecomputeCall, RepeatableLayer
from tunecompile.runtime.memory.rng_autocast import RngAutocastState
from tunecompile.runtime.watch.traced_graph import TracedGraph, also_watching

log = logging.getLogger("tunecompile")
T = TypeVar("T")
TRIES = 16  #: to make room on one device for one call


class BudgetedStep(Protocol):
    """The running step: `runtime.step.state.Step`."""

    budgets: tuple[RuntimePlanner, ...]  #: one for each device with layers


class Recovery:
    """Recovery of one model from a full device.

    Layers are repeatable only while a step needs more than half of its budget's room. Below that there is no need, and
    they may be recorded as CUDA graphs.
    """

    def __init__(self, step: BudgetedStep, slots: Sequence[RepeatableLayer]):
        self.step, self.slots = step, slots
        self.calls: weakref.WeakSet[RecomputeCall] = weakref.WeakSet()
        self.anchor = torch.empty(0, device="cpu", requires_grad=True)  #: makes detached arguments part of a graph
        self.looked: dict[int, set[TracedGraph | None]] = {}  #: by slot: graphs with which its layer is repeatable
        self.refused: dict[int, Note] = {}  #: by slot: why its layer cannot be repeated
        self.watched = False  #: whether hooks kept layers from being repeated
        self.bare = False  #: whether layers drop their graphs as soon as they have them
        self.open = 0  #: layers of this step whose backward was not seen
        self.running: RuntimePlanner | None = None  #: of the layer that ran last, or of the device that was full
        self.before: str | None = None  #: the plan under which memory ran out, until that is reported
        self.cause = "the step"  #: that ran out of memory
        self.agreement = RankPlans(RankStore(None, 0, 1))  #: with other ranks
        self.bound: Note | None = None  #: why no part of a step can be repeated by this process alone
        #: whether parts of the forward are gathered one by one, so that it cannot begin again; None as long as that is
        #: not known
        self.gathers: bool | None = None
        self.notes: list[Note] = []

    @property
    def budgets(self) -> Sequence[RuntimePlanner]:
        return self.step.budgets

    def devices(self) -> list[torch.device]:
        """Devices of the layers."""
        slots = [budget.layers[0] for budget in self.budgets] or self.slots
        return list(dict.fromkeys(device for slot in slots if (device := slot.device) is not None))

    def begin(self) -> None:
        """At the model's entry, after the budgets' own: plan for less if the last step ran out of memory for good."""
        for budget in [each for each in self.budgets if each.memory.overflowed()]:
            if self.open and budget.admitted is not None:
                self.before = self.before or self.in_words()
                budget.retreat(0)
                self.agreement.out_of_memory(budget)
        self.open = 0
        self._give_way()
        self.bound = self.bound or self._bound()
        if self.gathers is None:
            self.gathers = gathers_inside(self.budgets[0].memory.model) or any(slot.gathers for slot in self.slots)

    def _give_way(self) -> None:
        """Plan for less if other ranks ran out of memory since the last step."""
        news = self.agreement.news()
        before = self.in_words() if news else None
        for rank, room in news:
            if any([budget.give_way(room) for budget in self.budgets]):
                self.before, self.cause = self.before or before, f"rank {rank}"

    def layer(self, slot: RepeatableLayer, args: tuple, kwargs: dict) -> Any:
        """A layer's call, as one node of the caller's graph where it can be repeated."""
        budget = self.running = slot.budget
        if budget is None or not budget.tight or saving_is_taken() is not None:
            self.open += 1
            return slot.compiled(args, kwargs)
        if slot.watched:  # a loss that uses a tensor kept by a hook goes through the layer's own graph
            self.watched = True
            self.open += 1
            return slot.compiled(args, kwargs)
        if slot.gathers:  # outside of it nothing can be called again
            return self.attempt(lambda: self._layer(slot, args, kwargs))
        return self._layer(slot, args, kwargs)

    def _layer(self, slot: RepeatableLayer, args: tuple, kwargs: dict) -> Any:
        if id(slot) in self.refused:
            self.open += 1
            return slot.compiled(args, kwargs)
        start = RngAutocastState.now(slot.device or slot.budget.device)
        try:
            if self.bound is not None:
                raise NotExact(self.bound)
            if id(slot) in self.looked:
                try:
                    call = RecomputeCall(self, slot, start, args, kwargs)
                    with also_watching(call.expect_known):
                        return slot.compiled(*call.cut(call.given), call.join)
                except NewGraph:
                    start.rewind()
            call = RecomputeCall(self, slot, start, args, kwargs)
            with also_watching(call.met.append):
                return slot.compiled(*call.through(), call.first)
        except NotExact as inexact:
            self.refused[id(slot)] = inexact.reason
        start.rewind()
        self.open += 1
        return slot.compiled(args, kwargs)

    def attempt(self, call: Callable[[], T], restarts: bool = False) -> T:
        """Run a part of the forward pass, again with a smaller plan while the device runs out of memory.

        Args:
            call: the part.
            restarts: whether it begins with the step's first layer. Then, where no smaller plan helps, layers keep only
                their arguments.

        Raises:
            NothingFits: the smallest plan needs more memory than there is.
            StepLost, RankLost: other processes would have to repeat it, too.
        """
        if saving_is_taken() is not None:  # a checkpoint counts saved tensors, and would count those of a failed run
            return call()
        start, tries = RngAutocastState.now(*self.devices()), Counter()  # by device
        try:
            while True:
                try:
                    result = call()
                    break
                except (NothingFits, StepLost):
                    raise
                except torch.OutOfMemoryError as error:
                    if not self.budgets:
                        raise
                    missing, full = requested(error), self.full(error)
                start.rewind()  # not before the error is gone, and with it all tensors that its frames hold
                tries[full.device] += 1
                if not self.make_room(missing, tries[full.device], full, restarts):
                    if self.bare or not restarts:
                        raise self.given_up(missing)
                    self.bare = True
        finally:
            self.bare = self.bare and not restarts
        self.tell()
        return result

    def make_room(self, missing: int, tries: int, budget: RuntimePlanner, restarts: bool = False) -> bool:
        """Drop graphs on a device and plan for less there, at the second try for as little as possible.

        Whether either was possible.
        """
        self.running = budget
        before = self.in_words()
        dropped = [call for call in list(self.calls) if call.slot.budget is budget and call.drop()]
        gc.collect()
        budget.settle()
        budget.memory.gauge.release()
        for each in self.budgets:
            each.memory.overflowed()  # which is dealt with
            each.progress.steps -= restarts
        smaller = budget.retreat(missing if tries == 1 else None)
        self.agreement.out_of_memory(budget)
        if self.bound is not None or (restarts and self.gathers):
            # The forward would gather each layer once more, up to the one that failed. The other ranks gathered them
            # once, and would take
            # these collectives for their next ones.
            raise self.lost(missing)
        self.before = self.before or before
        return (smaller or bool(dropped)) and tries < TRIES

    def full(self, error: torch.OutOfMemoryError) -> RuntimePlanner:
        """The budget of the device that is full; where torch's error does not name it, of the layer that ran last."""
        number = full_gpu(error)
        return next(
            (budget for budget in self.budgets if budget.device.index == number is not None),
            self.running or self.budgets[0],
        )

    def lost(self, missing: int) -> StepLost | RankLost:
        """The error for a step that this process cannot repeat by itself."""
        told = {"missing": _short(missing), "reason": self.bound or note("share-parameters"), "plan": self.in_words()}
        if self.agreement.board.ranks == 1:
            return StepLost(**told)
        return RankLost(
            rank=self.agreement.board.rank,
            ranks=self.agreement.board.ranks,
            less=shown(max(0, self.running.memory.allowed() - self.running.memory.surplus)),
            **told,
        )

    def given_up(self, missing: int) -> NothingFits | RankLost:
        """The error where there is no smaller plan.

        Where layers are gathered, the other ranks are in the middle of the step.
        """
        if self.gathers and self.agreement.board.ranks > 1:
            return self.lost(missing)
        self.before, self.cause = None, "the step"
        return NothingFits(missing=_short(missing), plan=self.in_words(), help=helps(self.running, missing))

    def tell(self) -> None:
        """Report the new plan, once it worked."""
        if self.budgets:
            self.agreement.tell(self.budgets, self.in_words)
        if self.before is None:
            return
        before, self.before, after = self.before, None, self.in_words()
        who, self.cause = self.cause, "the step"
        changed = note("ran-out-of-memory", who, after, before=before)
        told = changed if before != after else note("smallest-plan-ran-out", who, after)
        if told not in self.notes:
            self.notes.append(told)
            log.warning("tunecompile: %s", told)

    def in_words(self) -> str:
        """The plans of all devices."""
        several = len(self.budgets) > 1
        said = (
            f"{plan['layers']} layers{f' of {budget.device}' if several else ''} {describe_plan(plan)}"
            for budget in self.budgets
            for plan in budget.plans_by_layer()
        )
        return " / ".join(said) or "yet to be made"

    def _bound(self) -> Note | None:
        if is_shared():
            return note("exchange-keys")
        parameters = [next(slot.layer.parameters(), None) for slot in self.slots if not slot.gathers]
        shared = any(parameter is None or sharded(parameter) for parameter in parameters)
        return note("share-parameters") if shared else None

    def report_notes(self) -> list[Note]:
        """For the report."""
        watched = [note("have-hooks")] if self.watched else []
        reasons: dict[Note, None] = dict.fromkeys([*self.refused.values(), *watched])
        return (
            self.notes
            + self.agreement.report_notes(self.budgets, self.in_words())
            + [note("layers-not-repeated", detail=reason) for reason in reasons]
        )


def _short(missing: int) -> str:
    return f"{shown(missing)}" if missing else "an unknown number of bytes"


def helps(budget: RuntimePlanner, missing: int) -> str:
    """The change that would help the user most, by the bytes that plans are made with."""
    made = budget.admitted
    if made is None:
        return "Most would help a smaller model, or one in fewer bits: memory ran out before its first layer."
    held = sum(option.held for options in made.choice.options for option in options)
    if budget.device.type == "cuda" and held > missing and budget.memory.host_is_full(missing):
        return (
            f"Most would help a larger host_memory= (or offload_dir=): {shown(held)} that layers hold could wait there."
        )
    share = 1 - max(missing, 0.05 * made.choice.peak) / max(1, made.choice.peak)
    if share > 0:
        fitting = int(share * made.tokens)
        return f"Most would help a smaller batch: about {fitting} tokens would fit, this one has {made.tokens}."
    return (
        "Most would help fewer bytes beside the layers (weights in 4 bits, fewer trained parameters): "
        f"they are {shown(made.resident)}."
    )
