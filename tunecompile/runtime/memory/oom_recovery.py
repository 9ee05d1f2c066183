"""Running out of memory under a budget: what was computed is given up as far as it can be computed again, and the step goes on.

A layer's own graph can be dropped at any time, and made again from what it was called with (tunecompile/runtime/memory/recompute_call.py). When a device is full,
all layers on it drop theirs, its budget makes a plan that needs less, and only what failed runs again: the forward of the module that owns the layers,
head and loss, or one layer's backward. Layers without a graph compute it again when their backward comes, from the same arguments, random state and
autocast, as a checkpoint would.

A layer that FSDP2 gathers is repeated between its hooks, where it is whole and nothing is sent (tunecompile/integrations/fsdp.py): in the forward by itself, since the
module that owns the layers would gather them all again, which no rank can do alone. The others wait in what they send next.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tunecompile._torch.autograd import saving_is_taken
from tunecompile.errors import NothingFits, RankLost, StepLost
from tunecompile.integrations.context_parallel import is_shared
from tunecompile.integrations.fsdp import gathers_inside
from tunecompile.integrations.rank_store import RankStore
from tunecompile.planner.device_memory import shown
from tunecompile.planner.solver import describe_plan
from tunecompile.runtime.memory.across_ranks import RankPlans
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.recompute_call import NotExact, RecomputeCall, full_gpu, requested
from tunecompile.runtime.memory.rng_autocast import RngAutocastState

log = logging.getLogger("tunecompile")
T = TypeVar("T")
_SHARDED = ("device_mesh", "ds_id", "_fsdp_flattened")  #: what FSDP's, DeepSpeed's and tensor-parallel parameters have
TRIES = 16  #: to make room on one device for one call
_SHARES = "share their parameters with other processes, which would have to repeat it, too"


def sharded(parameter: Tensor) -> bool:
    return any(hasattr(parameter, name) for name in _SHARDED)


class Recovery:
    """What one model does when a device is full.

    Layers are repeatable only while a step needs more than half of what the budget leaves it: with less, there is no need, and they may be
    recorded as CUDA graphs.
    """

    def __init__(self, step: Any, slots: Sequence[Any]):
        self.step, self.slots = step, slots
        self.calls: weakref.WeakSet[RecomputeCall] = weakref.WeakSet()
        self.anchor = torch.empty(0, requires_grad=True)  #: makes what is cut part of a graph
        self.looked: set[int] = set()  #: slots of which it is known whether their layers can be repeated
        self.refused: dict[int, str] = {}  #: by slot: why its layer cannot be repeated
        self.watched = False  #: whether hooks kept layers from being repeated
        self.bare = False  #: whether layers give up their graphs as soon as they have them
        self.open = 0  #: layers of this step that had no backward that is known of
        self.running: RuntimePlanner | None = None  #: of the layer that ran last, or of the device that was full
        self.before: str | None = None  #: the plan under which memory ran out, until the user is told
        self.cause = "the step"  #: what ran out of it
        self.agreement = RankPlans(RankStore(None, 0, 1))  #: with other ranks
        self.bound: str | None = None  #: why no part of a step can be repeated by this process alone
        self.gathers: bool | None = (
            None  #: whether parts of the forward are gathered one by one, so that it cannot begin again; None as long as that is not known
        )
        self.notes: list[str] = []

    @property
    def budgets(self) -> Sequence[RuntimePlanner]:
        return self.step.budgets

    def devices(self) -> list[torch.device]:
        """That layers are on now."""
        slots = [budget.layers[0] for budget in self.budgets] or self.slots
        return list(dict.fromkeys(device for slot in slots if (device := slot.device) is not None))

    def refuse(self, slot: Any, reason: str) -> None:
        """Its layer runs as it is from here on."""
        self.refused[id(slot)] = reason

    def begin(self) -> None:
        """At the model's entry, after the budget's own: if the last step ran out of memory where nothing could be done, plan for less."""
        for budget in [each for each in self.budgets if each.overflowed()]:
            if self.open and budget.admitted is not None:
                self.before = self.before or self.in_words()
                budget.retreat(0)
                self.agreement.out_of_memory(budget)
        self.open = 0
        self._give_way()
        self.bound = self.bound or self._bound()
        if self.gathers is None:
            self.gathers = gathers_inside(self.budgets[0].model) or any(slot.gathers for slot in self.slots)

    def _give_way(self) -> None:
        """Other ranks may have run out of memory since the last step."""
        news = self.agreement.news()
        before = self.in_words() if news else None
        for rank, room in news:
            if any([budget.give_way(room) for budget in self.budgets]):
                self.before, self.cause = self.before or before, f"rank {rank}"

    def layer(self, slot: Any, args: tuple, kwargs: dict) -> Any:
        """A layer's call, as one node of the caller's graph where it can be repeated."""
        budget = self.running = slot.budget
        if budget is None or not budget.tight or saving_is_taken() is not None:
            self.open += 1
            return slot.compiled(args, kwargs)
        if slot.watched:  # a loss that uses what a hook kept goes through the layer's own graph
            self.watched = True
            self.open += 1
            return slot.compiled(args, kwargs)
        if slot.gathers:  # out here nothing but the layer itself can be called again
            return self.attempt(lambda: self._layer(slot, args, kwargs))
        return self._layer(slot, args, kwargs)

    def _layer(self, slot: Any, args: tuple, kwargs: dict) -> Any:
        if id(slot) in self.refused:
            self.open += 1
            return slot.compiled(args, kwargs)
        start = RngAutocastState.now(slot.device or slot.budget.device)
        try:
            if self.bound is not None:
                raise NotExact(self.bound)
            call = RecomputeCall(self, slot, start, args, kwargs)
            if id(slot) not in self.looked:
                return slot.compiled(*call.through(), call.first)
            return slot.compiled(*call.cut(call.given), call.join)
        except NotExact as reason:
            self.refuse(slot, str(reason))
        start.rewind()
        self.open += 1
        return slot.compiled(args, kwargs)

    def attempt(self, call: Callable[[], T], restarts: bool = False) -> T:
        """A part of the forward pass, and again with less while the device runs out of memory. restarts: it begins with the step's first
        layer, and where no smaller plan helps, its layers keep nothing but what they are called with.

        Raises:
            NothingFits: that is more than there is.
            StepLost, RankLost: other processes would have to repeat it, too.
        """
        if saving_is_taken() is not None:  # a checkpoint counts what is saved, and would miss what failed
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
                start.rewind()  # not before the error is forgotten, and with it all that its frames hold
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
        """Give up what can be computed again on a device, and plan for less there: at the second try for as little as possible. Whether either was possible."""
        self.running = budget
        before = self.in_words()
        dropped = [call for call in list(self.calls) if call.slot.budget is budget and call.drop()]
        gc.collect()
        budget.settle()
        budget.gauge.release()
        for each in self.budgets:
            each.overflowed()  # which is dealt with
            each.steps -= restarts
        smaller = budget.retreat(missing if tries == 1 else None)
        self.agreement.out_of_memory(budget)
        if self.bound is not None or (restarts and self.gathers):
            # The forward would gather each layer once more, up to where it failed. The others gathered them once, and would take that for what they send next.
            raise self.lost(missing)
        self.before = self.before or before
        return (smaller or bool(dropped)) and tries < TRIES

    def full(self, error: torch.OutOfMemoryError) -> RuntimePlanner:
        """The budget of the device that is; where torch does not tell, of the layer that ran last."""
        number = full_gpu(error)
        return next(
            (budget for budget in self.budgets if budget.device.index == number is not None),
            self.running or self.budgets[0],
        )

    def lost(self, missing: int) -> StepLost | RankLost:
        """A step that this process cannot repeat by itself."""
        told = {"missing": _short(missing), "reason": self.bound or _SHARES, "plan": self.in_words()}
        if self.agreement.board.ranks == 1:
            return StepLost(**told)
        return RankLost(
            rank=self.agreement.board.rank, ranks=self.agreement.board.ranks, less=shown(self.running.within()), **told
        )

    def given_up(self, missing: int) -> NothingFits | RankLost:
        """There is no smaller plan. Of a step whose layers are gathered the others are in the middle."""
        if self.gathers and self.agreement.board.ranks > 1:
            return self.lost(missing)
        self.before, self.cause = None, "the step"
        return NothingFits(missing=_short(missing), plan=self.in_words(), help=helps(self.running, missing))

    def tell(self) -> None:
        """Once it went well, and the new plan is known."""
        if self.budgets:
            self.agreement.tell(self.budgets, self.in_words)
        if self.before is None:
            return
        before, self.before, after = self.before, None, self.in_words()
        who, self.cause = self.cause, "the step"
        note = (
            f"{who} ran out of memory: the plan was {before}, and is now {after}"
            if before != after
            else f"{who} ran out of memory under its smallest plan ({after}), and layers had to compute everything again"
        )
        if note not in self.notes:
            self.notes.append(note)
            log.warning("tunecompile: %s", note)

    def in_words(self) -> str:
        """The plan, of all devices."""
        plans = ((budget, plan) for budget in self.budgets for plan in budget.plans_by_layer())
        return (
            " / ".join(
                f"{plan['layers']} layers{f' of {budget.device}' if len(self.budgets) > 1 else ''} {describe_plan(plan)}"
                for budget, plan in plans
            )
            or "yet to be made"
        )

    def _bound(self) -> str | None:
        if is_shared():
            return "exchange keys and values with other processes, which would have to repeat it, too"
        parameters = [next(slot.layer.parameters(), None) for slot in self.slots if not slot.gathers]
        return _SHARES if any(parameter is None or sharded(parameter) for parameter in parameters) else None

    def said(self) -> list[str]:
        """For the report."""
        reasons = dict.fromkeys(
            (*self.refused.values(), *(["have hooks, which may keep what is inside"] if self.watched else []))
        )
        return (
            self.notes
            + self.agreement.said(self.budgets, self.in_words())
            + [
                f"layers are not repeated where memory runs out in the backward pass: they {reason}"
                for reason in reasons
            ]
        )


def _short(missing: int) -> str:
    return f"{shown(missing)}" if missing else "an unknown number of bytes"


def helps(budget: RuntimePlanner, missing: int) -> str:
    """What the user had best change, by the model of bytes that plans are made with."""
    made = budget.admitted
    if made is None:
        return "Most would help a smaller model, or one in fewer bits: memory ran out before its first layer."
    held = sum(option.held for options in made.choice.options for option in options)
    if budget.device.type == "cuda" and held > missing and budget.host_is_full(missing):
        return (
            f"Most would help a larger host_memory= (or offload_dir=): {shown(held)} that layers hold could wait there."
        )
    share = 1 - max(missing, 0.05 * made.choice.peak) / max(1, made.choice.peak)
    if share > 0:
        return f"Most would help a smaller batch: about {int(share * made.tokens)} tokens would fit, this one has {made.tokens}."
    return f"Most would help fewer bytes beside the layers (weights in 4 bits, fewer trained parameters): they are {shown(made.resident)}."
