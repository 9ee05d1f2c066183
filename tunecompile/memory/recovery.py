"""Running out of memory under a budget: what was computed is given up as far as it can be computed again, and the step goes on.

A layer is one node of the caller's autograd graph; its own graph lies behind that node and can be dropped at any time, since the node
keeps what the layer was called with. When a device is full, all layers on it drop theirs, its budget makes a plan that needs less, and only what
failed runs again: the forward of the module that owns the layers, head and loss, or one layer's backward. Layers without a graph compute it
again when their backward comes, from the same arguments, random state and autocast, as a checkpoint would.

Why a node for each layer, and not one for the model: its gradients are handed to the caller's graph by one layer at a time and `.grad` is touched
by nobody else, so there is nothing to restore. Accumulation, full fine-tuning, optimizers in hooks after accumulation, DDP and
`torch.autograd.grad` see what they saw. One layer is repeated, not the step. And what a layer is called with is known, whoever computes the loss.

A layer that FSDP2 gathers is repeated between its hooks, where it is whole and nothing is sent (tunecompile/fsdp.py): in the forward by itself, since the
module that owns the layers would gather them all again, which no rank can do alone. The others wait in what they send next.
"""

from __future__ import annotations

import gc
import logging
import re
import weakref
from typing import Any, Callable, Sequence, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from tunecompile._torch import saving_is_taken
from tunecompile.context import is_shared
from tunecompile.errors import ModifiedInPlace, NoSecondDerivative, NothingFits, RankLost, StepLost
from tunecompile.fsdp import gathers_inside
from tunecompile.memory.agreement import Agreement
from tunecompile.memory.budget import Budget, in_words
from tunecompile.memory.gauge import shown
from tunecompile.memory.surroundings import Surroundings
from tunecompile.ranks import Board

log = logging.getLogger("tunecompile")
T = TypeVar("T")
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_SHARDED = ("device_mesh", "ds_id", "_fsdp_flattened")  #: what FSDP's, DeepSpeed's and tensor-parallel parameters have
_SHARES = "share their parameters with other processes, which would have to repeat it, too"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def sharded(parameter: Tensor) -> bool:
    return any(hasattr(parameter, name) for name in _SHARDED)


class NotExact(Exception):
    """A layer that could not be repeated with the same result; the message says why."""


def requested(error: torch.OutOfMemoryError) -> int:
    """Bytes that could not be had; 0 where the error does not tell."""
    found = re.search(r"allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)", str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


class _Cut(torch.autograd.Function):
    """The tensors, without their history. They have a node, at which gradients are taken, and are no leaves: those would be kept by their node."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)


class _Node(torch.autograd.Function):
    """A layer's call in the caller's graph. What it was called with is saved where the layer's own tensors are: on the host, under some plans."""

    @staticmethod
    def forward(ctx: Any, call: "Call", given: list[Tensor], made: list[Tensor], *_inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        return tuple(tensor.detach() for tensor in made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NoSecondDerivative(name="A model under a memory budget")
        return None, None, None, *ctx.call.backward(lambda: ctx.saved_tensors, grads)


class Call:
    """One forward of one layer. While `edges` are there, so is the layer's own graph. Where the layer changed an argument, it stays.

    Raises:
        NotExact: an argument may hold tensors that cannot be seen, or change while the layer runs.
    """

    def __init__(self, recovery: "Recovery", slot: Any, start: Surroundings, args: tuple, kwargs: dict):
        self.recovery, self.slot, self.start = recovery, slot, start
        self.leaves, self.form = _flat((args, kwargs), "are given")
        self.given = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.before = [tensor._version for tensor in self.given]
        self.leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in self.leaves]
        self.repeatable = True
        self.edges: list[GradientEdge] | None = None  #: of what the layer returned
        self.weights: list[tuple[GradientEdge, int]] = []  #: that it trains, with their versions
        self.args, self.kwargs = self.enter(self.given)

    def enter(self, given: Sequence[Tensor]) -> tuple[tuple, dict]:
        """The layer's arguments, cut off from whoever made them."""
        moving = [tensor for tensor in given if tensor.requires_grad]
        cut = list(_Cut.apply(self.recovery.anchor, *moving)) if moving else []
        self.sources = [get_gradient_edge(tensor) for tensor in cut]
        tensors = iter([cut.pop(0) if tensor.requires_grad else tensor for tensor in given])
        return tree_unflatten([next(tensors) if leaf is None else leaf[0] for leaf in self.leaves], self.form)

    def join(self, output: Any) -> Any:
        """What the layer returned, as the caller sees it.

        Raises:
            NotExact: it is part of a graph beyond its arguments and the layer's parameters.
        """
        given, self.given, self.args, self.kwargs = self.given, [], (), {}
        self.repeatable = self.before == [tensor._version for tensor in given]
        leaves, form = _flat(output, "return")
        made = _differentiable(leaves)
        if not made:
            return output
        self.edges = [get_gradient_edge(tensor) for tensor in made]
        weights = self._weights()
        self.weights = [(get_gradient_edge(weight), weight._version) for weight in weights]
        self.recovery.calls.add(self)
        self.recovery.open += 1
        inputs = [tensor for tensor in given if tensor.requires_grad] + weights
        seen = {id(inner): outer for inner, outer in zip(made, _Node.apply(self, given, made, *inputs))}
        if self.recovery.bare:
            self.drop()
        return tree_unflatten([seen.get(id(leaf), leaf) for leaf in leaves], form)

    def _weights(self) -> list[Tensor]:
        """The parameters that the layer's graph ends in."""
        found, seen, pending = [], set(self.sources and [self.sources[0].node]), [edge.node for edge in self.edges]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":
                found.append(node.variable)
            pending.extend(following for following, _ in node.next_functions if following is not None)
        own = self.recovery.parameters(self.slot, found)
        for leaf in found:
            if id(leaf) not in own:
                raise NotExact("use tensors with a gradient that are neither arguments nor parameters of theirs")
            if leaf._backward_hooks:  # it would be called here, and once more in the caller's graph
                raise NotExact("have hooks on their parameters")
        return found

    def backward(self, given: Callable[[], Sequence[Tensor]], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of what the layer was called with, and of its parameters. Its graph is used up: where the caller retains theirs, it is
        made again the next time."""
        tries, self.recovery.running = 0, self.slot.budget
        while True:
            try:
                if self.edges is None:
                    self._repeat(given())
                found = self._gradients(grads)
                break
            except (NothingFits, StepLost):
                raise
            except torch.OutOfMemoryError as error:
                missing = requested(error)
            self.edges = None  # of which a part is used up
            tries += 1
            if not self.recovery.make_room(missing, tries) or not self.repeatable:
                raise self.recovery.given_up(missing)
        self.edges = None
        self.recovery.open -= 1
        self.recovery.tell()
        return found

    def _gradients(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        reached = [(edge, grad) for edge, grad in zip(self.edges, grads) if grad is not None]
        inputs = [*self.sources, *(edge for edge, _ in self.weights)]
        if not reached or not inputs:
            return [None] * len(inputs)
        edges, grads = zip(*reached)
        return torch.autograd.grad(edges, inputs, grads, allow_unused=True)

    def _repeat(self, given: Sequence[Tensor]) -> None:
        for edge, version in self.weights:
            if (weight := edge.node.variable)._version != version:
                what = f"{list(weight.shape)} is at version {weight._version}; expected version {version}"
                raise ModifiedInPlace(what=what, layer=self.slot.region.name)
        with self.start.again():
            args, kwargs = self.enter(given)
            leaves, _ = _flat(self.slot.compiled(args, kwargs), "return")
            self.edges = [get_gradient_edge(tensor) for tensor in _differentiable(leaves)]

    def drop(self) -> bool:
        """Give up the layer's graph, if it can be made again. Whether there was one."""
        dropped = self.edges is not None and self.repeatable
        self.edges = None if dropped else self.edges
        return dropped


def _flat(value: Any, verb: str) -> tuple[list, Any]:
    """Tensors and plain values, and the form they are in. Nothing else is looked into, or rebuilt."""
    leaves, form = tree_flatten(value, is_leaf=lambda item: type(item) not in (tuple, list, dict))
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN) and type(leaf) not in (Tensor, nn.Parameter):
            raise NotExact(f"{verb} a {type(leaf).__name__}")
    return leaves, form


def _differentiable(leaves: Sequence[Any]) -> list[Tensor]:
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}.values())


class Recovery:
    """What one model does when a device is full.

    Layers are repeatable only while a step needs more than half of what the budget leaves it: with less, there is no need, and they may be
    recorded as CUDA graphs.
    """

    def __init__(self, step: Any, slots: Sequence[Any]):
        self.step, self.slots = step, slots
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self.anchor = torch.empty(0, requires_grad=True)  #: makes what is cut part of a graph
        self.own: dict[int, set[int]] = {}
        self.refused: dict[int, str] = {}  #: by slot: why its layer cannot be repeated
        self.bare = False  #: whether layers give up their graphs as soon as they have them
        self.open = 0  #: layers of this step that had no backward that is known of
        self.running: Budget | None = None  #: of the layer that ran last, or of the device that was full
        self.before: str | None = None  #: the plan under which memory ran out, until the user is told
        self.cause = "the step"  #: what ran out of it
        self.agreement = Agreement(Board(None, 0, 1))  #: with other ranks
        self.bound: str | None = None  #: why no part of a step can be repeated by this process alone
        self.gathers: bool | None = None  #: whether parts of the forward are gathered one by one, so that it cannot begin again; None as long as that is not known
        self.notes: list[str] = []

    @property
    def budgets(self) -> Sequence[Budget]:
        return self.step.budgets

    def devices(self) -> list[torch.device]:
        """That layers are on; accelerate may keep some layers' weights elsewhere between calls."""
        return [budget.device for budget in self.budgets] or list(dict.fromkeys(device for slot in self.slots if (device := slot.device) is not None))

    def parameters(self, slot: Any, needed: Sequence[Tensor]) -> set[int]:
        """Of a layer, by identity; looked up anew where one is missing."""
        if not {id(parameter) for parameter in needed} <= self.own.get(id(slot), set()):
            self.own[id(slot)] = {id(parameter) for parameter in slot.layer.parameters()}
        return self.own.get(id(slot), set())

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
        if slot.gathers:  # out here nothing but the layer itself can be called again
            return self.attempt(lambda: self._layer(slot, args, kwargs))
        return self._layer(slot, args, kwargs)

    def _layer(self, slot: Any, args: tuple, kwargs: dict) -> Any:
        if id(slot) in self.refused:
            self.open += 1
            return slot.compiled(args, kwargs)
        start = Surroundings.now(slot.device)
        try:
            if self.bound is not None:
                raise NotExact(self.bound)
            call = Call(self, slot, start, args, kwargs)
            return slot.compiled(call.args, call.kwargs, call.join)
        except NotExact as reason:
            self.refused[id(slot)] = str(reason)
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
        start, tries = Surroundings.now(*self.devices()), 0
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
                    missing = requested(error)
                start.rewind()  # not before the error is forgotten, and with it all that its frames hold
                tries += 1
                if not self.make_room(missing, tries, restarts):
                    if self.bare or not restarts:
                        raise self.given_up(missing)
                    self.bare = True
        finally:
            self.bare = self.bare and not restarts
        self.tell()
        return result

    def make_room(self, missing: int, tries: int, restarts: bool = False) -> bool:
        """Give up what can be computed again, and plan for less: at the second try for as little as possible. Whether either was possible."""
        budget = self.running = self._full()
        before = self.in_words()
        dropped = [call for call in list(self.calls) if call.slot.budget is budget and call.drop()]
        gc.collect()
        budget.settle()
        budget.gauge.release()
        for each in self.budgets if restarts else ():
            each.steps -= 1
        smaller = budget.retreat(missing if tries == 1 else None)
        self.agreement.out_of_memory(budget)
        if self.bound is not None or (restarts and self.gathers):
            # The forward would gather each layer once more, up to where it failed. The others gathered them once, and would take that for what they send next.
            raise self.lost(missing)
        self.before = self.before or before
        return smaller or bool(dropped)

    def _full(self) -> Budget:
        """Of the device that is. A CPU keeps no count of what failed."""
        failed = [budget for budget in self.budgets if budget.overflowed()]
        return failed[-1] if failed else self.running or self.budgets[0]

    def lost(self, missing: int) -> StepLost | RankLost:
        """A step that this process cannot repeat by itself."""
        told = {"missing": _short(missing), "reason": self.bound or _SHARES, "plan": self.in_words()}
        if self.agreement.board.ranks == 1:
            return StepLost(**told)
        return RankLost(rank=self.agreement.board.rank, ranks=self.agreement.board.ranks, less=shown(self.running.within()), **told)

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
        note = f"{who} ran out of memory: the plan was {before}, and is now {after}" if before != after else \
            f"{who} ran out of memory under its smallest plan ({after}), and layers had to compute everything again"
        if note not in self.notes:
            self.notes.append(note)
            log.warning("tunecompile: %s", note)

    def in_words(self) -> str:
        """The plan, of all devices."""
        plans = ((budget, plan) for budget in self.budgets for plan in budget.plans_by_layer())
        return " / ".join(f"{plan['layers']} layers{f' of {budget.device}' if len(self.budgets) > 1 else ''} {in_words(plan)}" for budget, plan in plans) or "yet to be made"

    def _bound(self) -> str | None:
        if is_shared():
            return "exchange keys and values with other processes, which would have to repeat it, too"
        parameters = [next(slot.layer.parameters(), None) for slot in self.slots if not slot.gathers]
        return _SHARES if any(parameter is None or sharded(parameter) for parameter in parameters) else None

    def said(self) -> list[str]:
        """For the report."""
        reasons = dict.fromkeys(self.refused.values())
        return self.notes + self.agreement.said(self.budgets, self.in_words()) + [f"layers are not repeated where memory runs out in the backward pass: they {reason}" for reason in reasons]


def _short(missing: int) -> str:
    return f"{shown(missing)}" if missing else "an unknown number of bytes"


def helps(budget: Budget, missing: int) -> str:
    """What the user had best change, by the model of bytes that plans are made with."""
    made = budget.admitted
    if made is None:
        return "Most would help a smaller model, or one in fewer bits: memory ran out before its first layer."
    held = sum(option.held for options in made.choice.options for option in options)
    if budget.device.type == "cuda" and held > missing and budget.host_is_full(missing):
        return f"Most would help a larger host_memory= (or offload_dir=): {shown(held)} that layers hold could wait there."
    share = 1 - max(missing, 0.05 * made.choice.peak) / max(1, made.choice.peak)
    if share > 0:
        return f"Most would help a smaller batch: about {int(share * made.tokens)} tokens would fit, this one has {made.tokens}."
    return f"Most would help fewer bytes beside the layers (weights in 4 bits, fewer trained parameters): they are {shown(made.resident)}."
