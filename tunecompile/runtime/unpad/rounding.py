"""Sizes that come with batches are rounded up, so that shapes recur: rows without padding, and the patches of a tower.

A layer has two graphs: for rows of documents, of any number of tokens, and for batches as they come, of the first size.
Rows with padding come as documents, and the number of tokens is rounded, so that launch-bound layers see shapes that
were recorded (`cuda_graphs.replay`). Rows without any come as documents where their size is not the first one's, too,
unless the device is known to be busy with so many: there attention of whole rows is faster, and pays for a graph of its
own, at once where there is none of rows yet, or else in the end (`OFTEN`). A model that is given a mask makes one for
these. A tower's patches have another image behind them, so that their sizes recur.

That is right where attention is known to be causal, or to be by the bounds of images, and where layers treat each token
by itself otherwise. Their graphs say so: of a call that came as it is, and of the one that ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tunecompile._torch.autograd import in_backward
from tunecompile._torch.modules import slot_of
from tunecompile.notes import Note, note
from tunecompile.runtime.unpad.documents import BOTH_WAYS
from tunecompile.runtime.unpad.flat_batch import BOUNDARIES, FlatBatch
from tunecompile.runtime.unpad.image_bounds import ImageBounds
from tunecompile.runtime.unpad.masks.given import MASK, hidden_in, mask_in, place_of_mask
from tunecompile.runtime.unpad.owner_call import OwnerCall
from tunecompile.runtime.unpad.refusals import OwnerWatch
from tunecompile.runtime.unpad.sizes import rounded_up
from tunecompile.runtime.unpad.told import Told

#: batches without padding that ran by the graph of rows, from which one of their own pays: attention is faster
OFTEN = 256
LONG = 4096  #: tokens of a row, beyond which it pays at once
KINDS = 16  #: kinds of calls of one layer that are told apart
#: why padding stays, where that says nothing of rows without any
_OF_PADDING = ("one-owner-several-lists", "logits-read")


class Replays(Protocol):
    """What records launch-bound layers."""

    @property
    def closed(self) -> bool:
        """Whether nothing can be recorded."""
        ...

    @property
    def device(self) -> str:
        """The type of device whose graphs are recorded."""
        ...

    def last_waits(self) -> bool | None:
        """Whether launches of the forward that ran last are waited for; None where that is not known."""
        ...


class Graph(Protocol):
    """A compiled graph of a layer."""

    causal: int | None  #: how many calls of attention are causal without a mask; None where not all are
    both_ways: int | None  #: how many see all tokens, without a mask; None where not all do
    by_documents: int  #: how many are under a document mask
    recurrences: int  #: how many ops read tokens before each, and no other document's where they are told
    alone: bool  #: whether a call of the layer runs no other
    of_images: bool  #: whether it is a tower's, and told where images begin
    mixes: Note | None  #: why a tower's may read more patches than those of an image

    def computes_as(self, other: Any) -> bool:
        """Whether both compute the same, whatever they save."""
        ...

    def covers(self, other: Any) -> bool:
        """Whether it has all operations of another, but for attention, and for what adapters do to each token."""
        ...


@dataclass
class WithoutMask:
    """What is known of one layer's calls without a mask."""

    switches: list[dict[str, Any]]  #: attributes of modules that say whether attention is causal
    calls: dict[tuple, Graph] = field(default_factory=dict)  #: by kind: what runs, whose attention is causal, if any

    @staticmethod
    def of(layer: nn.Module) -> WithoutMask:
        """Of a layer that has not been looked at."""
        return WithoutMask(_switches_of(layer))

    def runs(self, kind: tuple) -> Graph | None:
        """What a call of this kind runs; None where that is not known."""
        found = self.calls.get(kind)
        causal = found is not None and found.causal is not None
        return found if all(each["is_causal"] is causal for each in self.switches) else None

    @property
    def attends_alone(self) -> bool:
        """Whether it has attention, and nothing else that reads other tokens: a mask of pairs says all there is."""
        return any(graph.causal and not graph.recurrences for graph in self.calls.values())


class Rounding:
    """Decides for the calls of one owner of layers whether their sizes are rounded up."""

    def __init__(
        self, owner: nn.Module, members: Callable[[], Sequence[nn.Module]], watch: OwnerWatch, replays: Replays | None
    ):
        self.owner, self.members, self.watch, self.replays = owner, members, watch, replays
        self.waits = 0  #: the largest number of tokens whose launches are known to be waited for
        self.computes: float = float("inf")  #: the smallest whose are not
        self.known: weakref.WeakKeyDictionary[nn.Module, WithoutMask] = weakref.WeakKeyDictionary()
        self.towers: weakref.WeakKeyDictionary[nn.Module, Graph] = weakref.WeakKeyDictionary()  #: of the last calls
        self.refused: Note | None = None  #: why no size is rounded from now on
        self.kept: Note | None = None  #: why the last one that changed was not
        self.scores = True  #: whether those of calls without gradients are
        self.count = 0  #: steps
        self.first: tuple[int, ...] | None = None  #: the size of the first batch without padding that came as it is
        self.apart = False  #: whether others did, which have a graph of their own
        self.joined = 0  #: how many others came as documents since these have a graph
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()  #: of padded batches
        #: of padded batches: the graph that ran, whose constants say it all, so that it is read once
        self.told: weakref.WeakKeyDictionary[nn.Module, tuple[Graph, Told]] = weakref.WeakKeyDictionary()
        self.alike: set[tuple[Graph, Graph]] = set()  #: graphs without a mask, and of documents that are as good
        self.looked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  #: layers whose call without a mask was looked at
        #: layers' ids, and attributes of their modules that say whether attention is causal
        self.switches: tuple[list[int], list[dict[str, Any]]] | None = None
        self.masked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  #: layers that were given a mask of whole rows

    @staticmethod
    def may_round(kept: Note | None) -> bool:
        """Whether rows without padding may be rounded where padding stays, for this reason."""
        return kept is None or kept.code in _OF_PADDING

    def batch_of(self, call: OwnerCall | None, layer: nn.Module, args: tuple, kwargs: dict) -> FlatBatch | None:
        """The batch of a layer's call that has no mask, of another size; None where it stays as it is."""
        if call is None or not call.rounds or self.refused is not None or call.is_repeated():
            return None
        if (call.sized and call.rounded is None) or not (self.scores or call.trains):
            return None
        images = getattr(slot_of(layer), "images", None)
        if images is not None:
            return self._patches(call, images, args, kwargs)
        kind, hidden = self._kind(layer, args, kwargs), hidden_in(args, kwargs)
        if kind is None or hidden is None or hidden.dim() != 3:
            return None
        rows, length, _ = hidden.shape
        if not call.sized:
            call.sized = True
            call.rounded = self._of_rows(call, rows, length, hidden.device)
        flat = call.rounded
        if flat is None or flat.shape != (rows, length) or self._runs(layer, kind) is None:
            return None
        told = self.told.get(layer)
        if told is not None:
            return told[1].tell(flat)
        if not self.known[layer].attends_alone:
            return None
        place = place_of_mask(layer, args, kwargs)
        return flat if place == flat.fills else replace(flat, fills=place)

    def _of_rows(self, call: OwnerCall, rows: int, length: int, device: torch.device) -> FlatBatch | None:
        """Rows without padding as documents; None where they come as they are."""
        size = rows, length
        prefixes = call.prefixes if self.first is not None and not self._sees_both_ways() else None
        if prefixes is not None and self._may(self._why_not_causal):
            shared = prefixes.of_whole_rows()
            if shared is not None:
                flat = FlatBatch.of_shared(shared, size, 0)
                flat.fills, flat.rounds = MASK, True
                return flat
        rounds = self._is_other(size) and self._waits(rows * length, device) and self._may(self._why_not_causal)
        joins = not rounds and self._joins(size)
        if rounds or joins:
            flat = FlatBatch.of_whole_rows(rows, length, 0, device, 0 if joins else rounded_up(rows * length, device))
            flat.fills, flat.rounds, flat.joins, call.whole = MASK, True, joins, True
            return flat
        self._came(size, call)
        return None

    def _came(self, size: tuple[int, ...], call: OwnerCall) -> None:
        """A batch comes as it is."""
        if call.trains:
            self.first = self.first or size
            self.apart |= self.first != size

    def came(self, layer: nn.Module, args: tuple, kwargs: dict, graph: Graph | None) -> None:
        """Learn from a layer's call that ran as it comes."""
        if in_backward() or (hidden := hidden_in(args, kwargs)) is None:
            return
        self._learn(hidden.shape[:-1].numel())
        if layer in self.looked or graph is None:
            return
        if graph.of_images:
            self.towers[layer] = graph
        kind = self._kind(layer, args, kwargs)
        if kind is None:
            if mask_in(args, kwargs) is not None:
                self.masked.add(layer)
            return
        self.looked.add(layer)
        self._learn_without_mask(layer, kind, graph)

    def _learn_without_mask(self, layer: nn.Module, kind: tuple, graph: Graph) -> None:
        if (graph.causal is None and graph.both_ways is None) or not graph.alone:
            return
        known = self.known.get(layer)
        if known is None:
            known = self.known[layer] = WithoutMask.of(layer)
        if len(known.calls) < KINDS:
            known.calls[kind] = graph

    def ran(self, layer: nn.Module, flat: FlatBatch, args: tuple, kwargs: dict, graph: Graph | None) -> Note | None:
        """Learn from a layer's call on a row of documents.

        Returns:
            Why what it returned cannot be used: other attention became that of documents than was causal without a
            mask, or a tower's graph may read what fills up its row.
        """
        self._learn(len(flat.index))
        if flat.bounds is not None and (why := _why_not_filled_up(graph)) is not None:
            return why
        if flat.whole and not flat.rounds:
            self.masked.add(layer)
        if flat.drops and graph is not None:
            self.graphs.add(graph)
            if layer not in self.told or self.told[layer][0] is not graph:
                self.told[layer] = graph, Told.of(layer, flat, args, kwargs)
        if flat.joins and not self._is_of_rows(graph):
            return note("own-mask")
        if not flat.rounds or flat.bounds is not None or graph is None:
            return None
        whole = self._runs(layer, self._kind(layer, args, kwargs))
        if (whole, graph) in self.alike:
            return None
        if whole is None or not _is_alike(whole, graph, flat.window == BOTH_WAYS):
            return note("own-mask")
        self.alike.add((whole, graph))
        return None

    def ran_as(self, call: OwnerCall) -> None:
        """Learn from the owner's call in a training step, which is over."""
        self.joined += call.joins and call.whole
        if call.rounded is not None and call.rounded.shared is None:
            self.joined += call.rounded.joins
            self.count += not call.rounded.joins

    def refuse(self, reason: Note) -> None:
        """From now on every size comes as it is; of calls without gradients, if this was one: a reference's, say, whose
        adapters are switched off.
        """
        if torch.is_grad_enabled():
            self.refused = reason
        else:
            self.scores = False

    def report(self) -> list[Note]:
        """For the report."""
        kind, why = type(self.owner).__name__, self.refused or self.kept
        told = [note("sizes-rounded", kind, count=self.count)] if self.count else []
        told += [note("whole-by-padded", kind, count=self.joined)] if self.joined else []
        return told + ([note("sizes-kept", kind, why)] if why is not None else [])

    def _runs(self, layer: nn.Module, kind: tuple | None) -> Graph | None:
        known = self.known.get(layer)
        return None if known is None or kind is None else known.runs(kind)

    def _kind(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        """What a layer's attention may follow, beside tensors; None where it has a mask or is told of documents."""
        place = place_of_mask(layer, args, kwargs)
        if place is None or any(kwargs.get(name) is not None for name in (MASK, *_TOLD)):
            return None
        if isinstance(place, int) and args[place] is not None:
            return None
        plain = ((name, _plain(value)) for name, value in (*enumerate(args), *kwargs.items()) if value is not None)
        return (getattr(getattr(self.owner, "config", None), "_attn_implementation", None), *plain)

    def _is_of_rows(self, graph: Graph | None) -> bool:
        """Whether rows ran by it. Another one may be of layers that were changed since."""
        if graph is not None and graph not in self.graphs and any(graph.computes_as(each) for each in self.graphs):
            self.graphs.add(graph)
        return graph in self.graphs or any(graph is flat for _, flat in self.alike)

    def _joins(self, size: tuple[int, int]) -> bool:
        """Whether rows without padding run by the graph of others, in place of one for changing sizes."""
        if not (len(self.graphs) or self.count) or not self._may_join(size):
            return False
        return (self._why_not_joined() or self.watch.reason()) is None

    def joins_by_mask(self, size: tuple[int, int]) -> bool:
        """Whether they do under a mask, which the model would leave out: attention is causal without it, too."""
        return len(self.graphs) > 0 and self._may_join(size) and self.is_causal() and self.watch.reason() is None

    def _may_join(self, size: tuple[int, int]) -> bool:
        return not self.apart and self.first != size and self.joined < OFTEN and size[1] <= LONG

    def _is_other(self, size: tuple[int, ...]) -> bool:
        """Whether a batch is not of the size that has a graph of its own."""
        return self.first is not None and self.first != size

    def is_causal(self) -> bool:
        """Whether modules of transformers' in layers say so. (Those of other packages are a reason of the watch's.)"""
        ids = [id(layer) for layer in self.members()]
        if self.switches is None or self.switches[0] != ids:
            self.switches = ids, [each for layer in self.members() for each in _switches_of(layer)]
        return all(each["is_causal"] for each in self.switches[1])

    def _sees_both_ways(self) -> bool:
        """Whether attention of a layer was told to see tokens behind each, too: what begins alike differs there."""
        return any(self.told[layer][1].window == BOTH_WAYS for layer in self.members() if layer in self.told)

    def _waits(self, tokens: int, device: torch.device) -> bool:
        """Whether launches of so many tokens are waited for, as far as is known, so that recordings pay."""
        if self.replays is None or self.replays.closed or tokens >= self.computes:
            return False
        return self.waits > 0 or device.type == self.replays.device

    def _patches(self, call: OwnerCall, images: ImageBounds, args: tuple, kwargs: dict) -> FlatBatch | None:
        """A tower's row of patches, with another image behind the last that fills it up."""
        hidden, found = hidden_in(args, kwargs), images.read(args, kwargs)
        if hidden is None or found is None or hidden.shape[:-2] not in ((), (1,)):
            return None
        bounds, offsets, longest = found
        if any(isinstance(x, Tensor) and x.dim() == 1 and x is not bounds for x in (*args, *kwargs.values())):
            return None  # other bounds, perhaps
        patches, lone = hidden.shape[-2], hidden.dim() == 2
        if not call.sized:
            call.sized = True
            waits = self._is_other((patches,)) and self._waits(patches, hidden.device)
            if waits and self._may(self._why_not_by_images):
                call.rounded = FlatBatch.of_patches(patches, rounded_up(patches, hidden.device), lone, hidden.device)
            else:
                self._came((patches,), call)
        flat = call.rounded
        if flat is None or (flat.real, flat.lone) != (patches, lone):
            return None
        return flat.by_images(bounds, offsets, len(longest) - 1)

    def _may(self, why_not: Callable[[], Note | None]) -> bool:
        """Whether nothing is in the way in layers, and nobody looks at what is inside them."""
        self.kept = why_not() or self.watch.reason()
        return self.kept is None

    def _why_not_causal(self) -> Note | None:
        return None if all(map(self._is_told, self.members())) else note("attention-not-causal")

    def _is_told(self, layer: nn.Module) -> bool:
        """Whether it is known how a layer without a mask is told of documents."""
        known = self.known.get(layer)
        return known is not None and (layer in self.told or known.attends_alone)

    def _why_not_joined(self) -> Note | None:
        """Layers that are given a mask of whole rows, of a window, say, are told by that."""
        members = self.members()
        known = {layer for layer in members if self._is_told(layer)}
        tells = bool(known) and all(layer in known or layer in self.masked for layer in members)
        return None if tells else note("attention-not-causal")

    def _why_not_by_images(self) -> Note | None:
        graphs = [self.towers.get(layer) for layer in self.members()]
        return next((why for graph in graphs if (why := _why_not_filled_up(graph)) is not None), None)

    def _learn(self, tokens: int) -> None:
        waits = None if self.replays is None else self.replays.last_waits()
        if waits:
            self.waits = max(self.waits, tokens)
            self.computes = self.computes if tokens < self.computes else float("inf")
        elif waits is not None:
            self.computes = min(self.computes, tokens)


def _switches_of(layer: nn.Module) -> list[dict[str, Any]]:
    """Attributes of its modules that say whether attention is causal."""
    return [vars(module) for module in layer.modules() if "is_causal" in vars(module)]


def _is_alike(whole: Graph, flat: Graph, both_ways: bool) -> bool:
    """Whether documents' graph does what one without a mask does, and reads other tokens as often, and as far.

    A layer may do more where it is given no mask. (What it does for a mask comes on top.)
    """
    calls = whole.both_ways if both_ways else whole.causal
    return (calls, whole.recurrences) == (flat.by_documents, flat.recurrences) and flat.covers(whole)


def _why_not_filled_up(graph: Graph | None) -> Note | None:
    """Why a tower's row may not be filled up where a layer runs this graph."""
    return note("runs-eagerly") if graph is None or not graph.of_images else graph.mixes


_TOLD = (*sorted(BOUNDARIES), "is_causal")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else type(value)
