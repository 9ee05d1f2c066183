"""How the layers of one owner attend, as their graphs say: of calls without a mask, and of those on documents."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from tunecompile.notes import Note, note
from tunecompile.runtime.unpad.flat_batch import BOUNDARIES, FlatBatch
from tunecompile.runtime.unpad.masks.given import MASK, mask_in, place_of_mask
from tunecompile.runtime.unpad.rounding.told import Told
from tunecompile.runtime.watch.traced_graph import TracedGraph

KINDS = 16  #: kinds of calls of one layer that are told apart


@dataclass
class WithoutMask:
    """What is known of one layer's calls without a mask."""

    switches: list[dict[str, Any]]  #: attributes of modules that say whether attention is causal
    calls: dict[tuple, TracedGraph] = field(default_factory=dict)  #: by kind: what runs

    def runs(self, kind: tuple) -> TracedGraph | None:
        """What a call of this kind runs; None where that is not known."""
        graph = self.calls.get(kind)
        causal = graph is not None and graph.causal is not None
        return graph if all(each["is_causal"] is causal for each in self.switches) else None

    @property
    def attends_alone(self) -> bool:
        """Whether it has attention, and nothing else that reads other tokens: a mask of pairs says all there is."""
        return any(graph.causal and not graph.recurrences for graph in self.calls.values())


class KnownAttention:
    """What is known of the layers of one owner."""

    def __init__(self, owner: nn.Module, members: Callable[[], Sequence[nn.Module]]):
        self.owner, self.members = owner, members
        self.known: weakref.WeakKeyDictionary[nn.Module, WithoutMask] = weakref.WeakKeyDictionary()
        self.graphs: weakref.WeakSet[TracedGraph] = weakref.WeakSet()  #: of padded batches
        #: of padded batches: the graph that ran, whose constants say it all, so that it is read once
        self.told: weakref.WeakKeyDictionary[nn.Module, tuple[TracedGraph, Told]] = weakref.WeakKeyDictionary()
        #: graphs without a mask, and of documents that are as good
        self.alike: set[tuple[TracedGraph, TracedGraph]] = set()
        self.looked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  #: layers whose call without a mask was looked at
        #: layers' ids, and attributes of their modules that say whether attention is causal
        self.switches: tuple[list[int], list[dict[str, Any]]] | None = None
        self.masked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  #: layers that were given a mask of whole rows

    def came(self, layer: nn.Module, args: tuple, kwargs: dict, graph: TracedGraph) -> None:
        """Learn from a layer's call that ran as it comes."""
        kind = self.kind(layer, args, kwargs)
        if kind is None:
            if mask_in(args, kwargs) is not None:
                self.masked.add(layer)
            return
        self.looked.add(layer)
        if (graph.causal is None and graph.both_ways is None) or not graph.alone:
            return
        known = self.known.get(layer)
        if known is None:
            known = self.known[layer] = WithoutMask(switches_of(layer))
        if len(known.calls) < KINDS:
            known.calls[kind] = graph

    def ran(
        self, layer: nn.Module, flat: FlatBatch, args: tuple, kwargs: dict, graph: TracedGraph | None
    ) -> Note | None:
        """Learn from a layer's call on a row of documents.

        Returns:
            Why what it returned cannot be used: other attention is of documents now than was causal without a mask.
        """
        if flat.whole and not flat.rounds:
            self.masked.add(layer)
        if flat.drops and graph is not None:
            self.graphs.add(graph)
            if layer not in self.told or self.told[layer][0] is not graph:
                self.told[layer] = graph, Told.of(layer, flat, args, kwargs)
        if flat.joins and not self._is_of_rows(graph):
            return note("own-mask")
        if not flat.rounds or graph is None:
            return None
        whole = self._runs(layer, self.kind(layer, args, kwargs))
        if (whole, graph) in self.alike:
            return None
        if whole is None or not is_alike(whole, graph, flat.window < 0):
            return note("own-mask")
        self.alike.add((whole, graph))
        return None

    def tell(self, layer: nn.Module, flat: FlatBatch, kind: tuple, args: tuple, kwargs: dict) -> FlatBatch | None:
        """Rows without padding as a layer's call of this kind is told of them; None where that is not known."""
        if self._runs(layer, kind) is None:
            return None
        if layer in self.told:
            return self.told[layer][1].tell(flat)
        if not self.known[layer].attends_alone:
            return None
        place = place_of_mask(layer, args, kwargs)
        return flat if place == flat.fills else replace(flat, fills=place)

    def is_causal(self) -> bool:
        """Whether modules of transformers' in layers say so. (Those of other packages are a reason of the watch's.)"""
        ids = [id(layer) for layer in self.members()]
        if self.switches is None or self.switches[0] != ids:
            self.switches = ids, [each for layer in self.members() for each in switches_of(layer)]
        return all(each["is_causal"] for each in self.switches[1])

    def sees_both_ways(self) -> bool:
        """Whether attention of a layer was told to see tokens behind each, too: what begins alike differs there."""
        return any(self.told[layer][1].window < 0 for layer in self.members() if layer in self.told)

    def why_not_causal(self) -> Note | None:
        """Why rows without padding, which have no mask, cannot be documents."""
        return None if all(map(self._is_told, self.members())) else note("attention-not-causal")

    def why_not_joined(self) -> Note | None:
        """The same, where layers that are given a mask of whole rows, of a window, say, are told by that."""
        members = self.members()
        known = {layer for layer in members if self._is_told(layer)}
        tells = bool(known) and all(layer in known or layer in self.masked for layer in members)
        return None if tells else note("attention-not-causal")

    def _is_told(self, layer: nn.Module) -> bool:
        """Whether it is known how a layer without a mask is told of documents."""
        known = self.known.get(layer)
        return known is not None and (layer in self.told or known.attends_alone)

    def _runs(self, layer: nn.Module, kind: tuple | None) -> TracedGraph | None:
        known = self.known.get(layer)
        return None if known is None or kind is None else known.runs(kind)

    def kind(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        """What a layer's attention may follow, beside tensors; None where it has a mask or is told of documents."""
        place = place_of_mask(layer, args, kwargs)
        if place is None or any(kwargs.get(name) is not None for name in (MASK, *_TOLD)):
            return None
        if isinstance(place, int) and args[place] is not None:
            return None
        plain = ((name, _plain(value)) for name, value in (*enumerate(args), *kwargs.items()) if value is not None)
        return (getattr(getattr(self.owner, "config", None), "_attn_implementation", None), *plain)

    def _is_of_rows(self, graph: TracedGraph | None) -> bool:
        """Whether rows ran by it. Another one may be of layers that were changed since."""
        if graph is not None and graph not in self.graphs and any(graph.computes_as(each) for each in self.graphs):
            self.graphs.add(graph)
        return graph in self.graphs or any(graph is flat for _, flat in self.alike)


def switches_of(layer: nn.Module) -> list[dict[str, Any]]:
    """Attributes of its modules that say whether attention is causal."""
    return [vars(module) for module in layer.modules() if "is_causal" in vars(module)]


def is_alike(whole: TracedGraph, flat: TracedGraph, both_ways: bool) -> bool:
    """Whether documents' graph does what one without a mask does, and reads other tokens as often, and as far.

    A layer may do more where it is given no mask. (What it does for a mask comes on top.)
    """
    calls = whole.both_ways if both_ways else whole.causal
    return (calls, whole.recurrences) == (flat.by_documents, flat.recurrences) and flat.covers(whole)


_TOLD = (*sorted(BOUNDARIES), "is_causal")


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    return Tensor if isinstance(value, Tensor) else type(value)  # a replayed layer's result is a subclass
