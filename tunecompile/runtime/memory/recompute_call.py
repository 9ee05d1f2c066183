"""A layer's call that can be repeated: one node of the caller's autograd graph.

The layer's own graph lies behind the node. It can be dropped at any time, since the node keeps the layer's arguments.

Why a node for each layer, and not one for the model? Each layer hands its gradients to the caller's graph, and no other
code writes to `.grad`, so there is nothing to restore. Accumulation, full fine-tuning, optimizers in hooks after
accumulation, DDP and `torch.autograd.grad` work as without it. One layer is repeated, not the step. And a layer's
arguments are known, wherever the loss is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from tunecompile._torch.autograd import differentiable_outputs, keeps_graph, made_since, next_number, walk
from tunecompile._torch.cuda import requested
from tunecompile.errors import LayerChanged, ModifiedInPlace, NoSecondDerivative, NothingFits, StepLost
from tunecompile.notes import Note, note
from tunecompile.runtime.memory.accounting import PlannedLayer
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.given_containers import GivenContainers
from tunecompile.runtime.memory.rng_autocast import RngAutocastState
from tunecompile.runtime.watch.module_watch import ModuleSnapshot, holders
from tunecompile.runtime.watch.traced_graph import TracedGraph, watching

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class RepeatableLayer(PlannedLayer, Protocol):
    """The slot of a layer whose calls may be repeated: `runtime.layers.layer_slot.LayerSlot`."""

    inside: ModuleSnapshot | None  #: None before its first call

    @property
    def budget(self) -> RuntimePlanner | None:
        """The planner of its device, where there is a budget."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered, and ranks communicate, around its call alone."""
        ...

    @property
    def watched(self) -> bool:
        """Whether a hook may keep values inside."""
        ...

    def compiled(self, args: tuple, kwargs: dict, finish: Callable = ...) -> Any:
        """Call the layer; `finish` gets its output while saved tensors are hooked."""
        ...


class RecomputeHost(Protocol):
    """The owner of a call, which helps when memory runs out: `oom_recovery.Recovery`."""

    anchor: Tensor  #: a leaf that requires a gradient, so that detached tensors have a node
    looked: dict[int, set[Any]]  #: by slot: graphs of its layer that were examined in a call
    calls: Any  #: a weak set of calls whose graphs can be dropped
    open: int  #: calls whose backward pass is still to come
    running: RuntimePlanner | None  #: of the layer whose backward runs
    bare: bool  #: whether graphs are dropped as soon as they are made
    refused: dict[int, Note]  #: by slot: why its layer is not repeated from now on

    def full(self, error: torch.OutOfMemoryError) -> RuntimePlanner:
        """The budget of the full device."""
        ...

    def make_room(self, missing: int, tries: int, full: RuntimePlanner) -> bool:
        """Drop graphs and plan anew; whether it makes sense to try again."""
        ...

    def given_up(self, missing: int) -> Exception:
        """The error where there is no smaller plan."""
        ...

    def tell(self) -> None:
        """Report the recovery, once the step went on."""
        ...


class NewGraph(Exception):
    """Raised before a graph of a layer runs that was not examined yet, so that the call can be made as its first."""


class NotExact(Exception):
    """A layer that could not be repeated with the same result.

    Args:
        reason: a note.
    """

    def __init__(self, reason: Note):
        super().__init__(reason)
        self.reason = reason


class _Cut(torch.autograd.Function):
    """Detaches the layer's inputs, so that its graph can be freed and rebuilt.

    Tensors go in as a list: as direct arguments they would become inputs of the node, and a weight shared with an
    earlier layer would be reached through them. The outputs are no leaves on purpose: a leaf would be kept alive by its
    AccumulateGrad node.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)


class _Node(torch.autograd.Function):
    """A layer's call in the caller's graph.

    Its arguments are saved with the layer's own tensors: on the host, under some plans.
    """

    @staticmethod
    def forward(
        ctx: Any, call: RecomputeCall, given: list[Tensor], made: list[Tensor], *_inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        return tuple(tensor.detach() for tensor in made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NoSecondDerivative(name="A model under a memory budget")
        return None, None, None, *ctx.call.backward(lambda: ctx.saved_tensors, grads)


class RecomputeCall:
    """One forward of one layer.

    `edges` hold the layer's own graph. It is never dropped if the layer wrote to an argument or buffer.

    Raises:
        NotExact: an argument may hold hidden tensors, or change while the layer runs.
    """

    def __init__(
        self, recovery: RecomputeHost, slot: RepeatableLayer, start: RngAutocastState, args: tuple, kwargs: dict
    ):
        self.recovery, self.slot, self.start, self.training = recovery, slot, start, slot.layer.training
        self.leaves, self.form = _flat((args, kwargs), "given-object")
        self.given = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.containers = GivenContainers((args, kwargs))
        self.leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in self.leaves]
        self.inside = slot.inside
        self.before = [(tensor, tensor._version) for tensor in self._writable()]
        self.repeatable: bool  #: known from `_look` on, as `edges` are
        self.number = next_number()
        self.met: list[TracedGraph | None] = []  #: its graphs; None where it ran eagerly
        self.edges: list[GradientEdge] | None = None  #: of the layer's outputs
        self.outputs = 0  #: their number
        self.sources: list[GradientEdge] = []  #: of its arguments
        self.weights: list[tuple[GradientEdge, int]] = []  #: that it trains, with their versions

    def _writable(self) -> list[Tensor]:
        """Tensors that a layer might write to."""
        return self.given + self.inside.buffers()

    def through(self) -> tuple[tuple, dict]:
        """The layer's arguments for its first call with a graph, as part of the caller's.

        So nothing has to be undone where the layer turns out not to be repeatable. With detached arguments it would
        have to run again, with its side effects: a loss in a list, a count in a buffer.
        """
        return self._called([tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in self.given])

    def cut(self, given: Sequence[Tensor]) -> tuple[tuple, dict]:
        """The layer's arguments, detached."""
        moving = [tensor for tensor in given if tensor.requires_grad]
        cut = list(_Cut.apply(self.recovery.anchor, moving)) if moving else []
        return self._called([cut.pop(0) if tensor.requires_grad else tensor for tensor in given])

    def _called(self, given: Sequence[Tensor]) -> tuple[tuple, dict]:
        self.sources = [get_gradient_edge(tensor) for tensor in given if tensor.requires_grad]
        tensors = iter(given)
        called = tree_unflatten([next(tensors) if leaf is None else leaf[0] for leaf in self.leaves], self.form)
        self.containers.hand_over(called)
        return called

    def expect_known(self, graph: TracedGraph | None) -> None:
        """Before a graph runs.

        Raises:
            NewGraph: the layer has not run it yet. It may hand out a loss, or write to an argument.
        """
        if graph not in self.recovery.looked[id(self.slot)]:
            raise NewGraph
        self.met.append(graph)

    def first(self, output: Any) -> Any:
        """The output of a first call with a graph: a node of the caller's graph, or the output if not repeatable."""
        self.recovery.open += 1
        if self.containers.written:
            self.containers.write_back()
            self.recovery.refused[id(self.slot)] = note("write-in-place")
            return output
        try:
            made = self._look(output)
            if made and not self.repeatable:
                raise NotExact(note("write-in-place"))
            if self._is_held(made, output):
                raise NotExact(note("expose-tensors"))  # a loss may go through the layer's own graph
        except NotExact as inexact:
            self.recovery.refused[id(self.slot)] = inexact.reason
            return output
        self.recovery.looked.setdefault(id(self.slot), set()).update(self.met)
        # an earlier layer may share its weights, whose gradients would then count as its own
        behind, _ = walk([get_gradient_edge(tensor) for tensor in self.given if tensor.requires_grad], [])
        if not set(behind).isdisjoint(edge.node for edge, _ in self.weights):
            return output
        self.recovery.open -= 1
        return self._joined(output, made)

    def _is_held(self, made: list[Tensor], output: Any) -> bool:
        """Whether anybody but the caller holds an output: the layer's modules, or others, if its graph is a new one."""
        if not {id(tensor) for tensor in made}.isdisjoint(map(id, self.inside.kept())):
            return True
        if set().union(*self.recovery.looked.values()).issuperset(self.met):
            return False
        around = [made, output]
        if made and isinstance(output, (tuple, list, dict)) and holders(output, around):  # as a whole, in a list, say
            return True
        return any(holders(tensor, around) for tensor in made)

    def join(self, output: Any) -> Any:
        """The output of a later call for the caller.

        Raises:
            NotExact: it is part of a graph beyond its arguments and the layer's parameters, or a list was written to.
        """
        if self.containers.written:
            raise NotExact(note("write-in-place"))
        made = self._look(output)
        if not self.repeatable:  # from the next call on; this one's arguments are detached, and it keeps its graph
            self.recovery.refused[id(self.slot)] = note("write-in-place")
        return self._joined(output, made)

    def _look(self, output: Any) -> list[Tensor]:
        """Outputs with a gradient. Also finds out whether the layer can be repeated.

        Raises:
            NotExact: its graph is connected to others beside its arguments and parameters.
        """
        made = _differentiable(_flat(output, "return-object")[0])
        after = self._writable()
        self.repeatable = len(after) == len(self.before) and all(
            new is old and new._version == version for new, (old, version) in zip(after, self.before)
        )
        self.outputs, self.edges = len(made), [get_gradient_edge(tensor) for tensor in made]
        leaves = self._weights() if made else []
        weights = [leaf.variable for leaf in leaves]
        if not self.inside.owns(weights):
            raise NotExact(note("outside-tensors"))
        if any(
            weight._backward_hooks for weight in weights
        ):  # they would be called here, and once more in the caller's graph
            raise NotExact(note("parameter-hooks"))
        self.weights = [(GradientEdge(leaf, 0), weight._version) for leaf, weight in zip(leaves, weights)]
        return made

    def _joined(self, output: Any, made: list[Tensor]) -> Any:
        """The output, as a node of the caller's graph."""
        given, self.given, self.before = self.given, [], []
        self.containers.forget()
        if not made:
            return output
        self.recovery.calls.add(self)
        self.recovery.open += 1
        inputs = [tensor for tensor in given if tensor.requires_grad] + [edge.node.variable for edge, _ in self.weights]
        seen = {id(inner): outer for inner, outer in zip(made, _Node.apply(self, given, made, *inputs))}
        if self.recovery.bare:
            self.drop()
        leaves, form = _flat(output, "return-object")
        return tree_unflatten([seen.get(id(leaf), leaf) for leaf in leaves], form)

    def _weights(self) -> list[Node]:
        """The nodes of the leaves that the layer's graph ends in.

        Raises:
            NotExact: parts of the graph can be reached beside the layer's outputs, or that is not known.
        """
        found, reached = walk(self.edges, self.sources)
        compiled = [
            (made, used) for node, used in reached.items() if (made := differentiable_outputs(node)) is not None
        ]
        if len(compiled) != 1:
            raise NotExact(note("several-graphs"))
        stops = {source.node for source in self.sources}
        if not all(node in stops or made_since(node, self.number) for node in reached):
            raise NotExact(note("outside-tensors"))  # weights that are computed outside, of the layer's own parameters
        if any(made - used for made, used in compiled):
            # A loss that uses them (a router's, left in an attribute) goes through the layer's own graph.
            raise NotExact(note("expose-tensors"))
        return found

    def backward(
        self, given: Callable[[], Sequence[Tensor]], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Gradients of the layer's arguments and parameters.

        Its graph is retained with the caller's, until memory runs out.
        """
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
                missing, full = requested(error), self.recovery.full(error)
            self.edges = None  # a part of the graph is used up
            tries += 1
            if not self.recovery.make_room(missing, tries, full) or not self.repeatable:
                raise self.recovery.given_up(missing)
        self.edges = self.edges if keeps_graph() else None
        self.recovery.open -= 1
        self.recovery.tell()
        return found

    def _gradients(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        reached = [(edge, grad) for edge, grad in zip(self.edges, grads) if grad is not None]
        inputs = [*self.sources, *(edge for edge, _ in self.weights)]
        if not reached or not inputs:
            return [None] * len(inputs)
        edges, grads = zip(*reached)
        return torch.autograd.grad(edges, inputs, grads, retain_graph=keeps_graph(), allow_unused=True)

    def _repeat(self, given: Sequence[Tensor]) -> None:
        name = self.slot.region.name
        for edge, version in self.weights:
            if (weight := edge.node.variable)._version != version:
                what = f"{list(weight.shape)} is at version {weight._version}; expected version {version}"
                raise ModifiedInPlace(what=what, layer=name)
        if self.slot.layer.training is not self.training:
            raise LayerChanged(layer=name, what="it was switched between training and evaluation")
        ran = iter(self.met)

        def expect_same(graph: TracedGraph | None) -> None:
            before = next(ran, None)
            if graph is not None and before is not None and not graph.computes_as(before):
                raise LayerChanged(layer=name, what="its code, or a number that it computes with, has changed")

        with self.start.restored(), watching(expect_same):
            args, kwargs = self.cut(given)
            made = _differentiable(_flat(self.slot.compiled(args, kwargs), "return-object")[0])
        self.edges = [get_gradient_edge(tensor) for tensor in made]
        found, _ = walk(self.edges, self.sources)
        trained = {id(edge.node.variable) for edge, _ in self.weights}
        if len(made) != self.outputs or {id(leaf.variable) for leaf in found} != trained:
            self.edges = None
            raise LayerChanged(layer=name, what="other weights of it are trained")

    def drop(self) -> bool:
        """Drop the layer's graph, if it can be made again. Returns whether there was one."""
        dropped = self.edges is not None and self.repeatable
        self.edges = None if dropped else self.edges
        return dropped


def _flat(value: Any, refusal: str) -> tuple[list, Any]:
    """Tensors and plain values, and their structure. No other containers are entered or rebuilt."""
    leaves, form = tree_flatten(value, is_leaf=lambda item: type(item) not in (tuple, list, dict))
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN) and type(leaf) not in (Tensor, nn.Parameter):
            raise NotExact(note(refusal, type(leaf).__name__))
    return leaves, form


def _differentiable(leaves: Sequence[Any]) -> list[Tensor]:
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}.values())
