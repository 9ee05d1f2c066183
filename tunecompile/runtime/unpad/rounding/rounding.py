"""Rows without padding as documents, whose number of tokens is rounded up.

A layer has two graphs: for rows of documents, of any number of tokens, and for batches as they come, of the first size.
Rows with padding come as documents, and the number of tokens is rounded, so that launch-bound layers see shapes that
were recorded (`cuda_graphs.replay`). Rows without any come as documents where their size is not the first one's, too,
unless the device is known to be busy with so many: there attention of whole rows is faster, and pays for a graph of its
own, at once where there is none of rows yet, or else in the end (`OFTEN`). A model that is given a mask makes one for
these.

That is right where attention is known to be causal, or to be by the bounds of images, and where layers treat each token
by itself otherwise. Their graphs say so: of a call that came as it is, and of the one that ran.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tunecompile._torch.autograd import in_backward
from tunecompile._torch.modules import slot_of
from tunecompile.notes import Note, note
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.masks.given import MASK, hidden_in
from tunecompile.runtime.unpad.owner_call import OwnerCall
from tunecompile.runtime.unpad.refusals import OwnerWatch
from tunecompile.runtime.unpad.rounding.attention import KnownAttention
from tunecompile.runtime.unpad.rounding.patches import PatchRounding, why_not_filled_up
from tunecompile.runtime.unpad.sizes import SizesSeen, rounded_up
from tunecompile.runtime.watch.traced_graph import TracedGraph

#: batches without padding that ran by the graph of rows, from which one of their own pays: attention is faster
OFTEN = 256
LONG = 4096  #: tokens of a row, beyond which it pays at once
#: why padding stays, where that says nothing of rows without any
_OF_PADDING = ("one-owner-several-lists", "logits-read")


class Rounding:
    """Decides for the calls of one owner of layers whether their sizes are rounded up."""

    def __init__(
        self,
        owner: nn.Module,
        members: Callable[[], tuple[nn.Module, ...]],
        watch: OwnerWatch,
        replays: GraphReplays | None,
    ):
        self.owner, self.watch = owner, watch
        self.sizes, self.attention = SizesSeen(replays), KnownAttention(owner, members)
        self.patches = PatchRounding(members, self.sizes, self._may)
        self.refused: Note | None = None  #: why no size is rounded from now on
        self.kept: Note | None = None  #: why the last one that changed was not
        self.scores = True  #: whether those of calls without gradients are
        self.count = 0  #: steps
        self.joined = 0  #: how many others came as documents since these have a graph

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
            return self.patches.batch_of(call, images, args, kwargs)
        kind, hidden = self.attention.kind(layer, args, kwargs), hidden_in(args, kwargs)
        if kind is None or hidden is None or hidden.dim() != 3:
            return None
        rows, length, _ = hidden.shape
        if not call.sized:
            call.sized = True
            call.rounded = self._of_rows(call, rows, length, hidden.device)
        if call.rounded is None or call.rounded.shape != (rows, length):
            return None
        return self.attention.tell(layer, call.rounded, kind, args, kwargs)

    def _of_rows(self, call: OwnerCall, rows: int, length: int, device: torch.device) -> FlatBatch | None:
        """Rows without padding as documents; None where they come as they are."""
        size, count, why_not = (rows, length), rows * length, self.attention.why_not_causal
        prefixes = call.prefixes if self.sizes.first is not None and not self.attention.sees_both_ways() else None
        if prefixes is not None and self._may(why_not):
            shared = prefixes.of_whole_rows()
            if shared is not None:
                flat = FlatBatch.of_shared(shared, size, 0)
                flat.fills, flat.rounds = MASK, True
                return flat
        rounds = self.sizes.recording_pays(size, count, device) and self._may(why_not)
        joins = not rounds and self._joins(size)
        if rounds or joins:
            flat = FlatBatch.of_whole_rows(rows, length, 0, device, 0 if joins else rounded_up(count, device))
            flat.fills, flat.rounds, flat.joins, call.whole = MASK, True, joins, True
            return flat
        self.sizes.came(size, call.trains)
        return None

    def came(self, layer: nn.Module, args: tuple, kwargs: dict, graph: TracedGraph | None) -> None:
        """Learn from a layer's call that ran as it comes."""
        if in_backward() or (hidden := hidden_in(args, kwargs)) is None:
            return
        self.sizes.learn(hidden.shape[:-1].numel())
        if layer in self.attention.looked or graph is None:
            return
        if graph.of_images:
            self.patches.graphs[layer] = graph
        self.attention.came(layer, args, kwargs, graph)

    def ran(
        self, layer: nn.Module, flat: FlatBatch, args: tuple, kwargs: dict, graph: TracedGraph | None
    ) -> Note | None:
        """Learn from a layer's call on a row of documents.

        Returns:
            Why what it returned cannot be used: see `KnownAttention.ran`; or a tower's graph may read what fills up
            its row.
        """
        self.sizes.learn(len(flat.index))
        if flat.bounds is not None:
            return why_not_filled_up(graph)
        return self.attention.ran(layer, flat, args, kwargs, graph)

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
        notes = [note("sizes-rounded", kind, count=self.count)] if self.count else []
        notes += [note("whole-by-padded", kind, count=self.joined)] if self.joined else []
        return notes + ([note("sizes-kept", kind, why)] if why is not None else [])

    def _joins(self, size: tuple[int, int]) -> bool:
        """Whether rows without padding run by the graph of others, in place of one for changing sizes."""
        if not (len(self.attention.graphs) or self.count) or not self._may_join(size):
            return False
        return (self.attention.why_not_joined() or self.watch.reason()) is None

    def joins_by_mask(self, size: tuple[int, int]) -> bool:
        """Whether they do under a mask, which the model would leave out: attention is causal without it, too."""
        joins = len(self.attention.graphs) > 0 and self._may_join(size) and self.attention.is_causal()
        return joins and self.watch.reason() is None

    def _may_join(self, size: tuple[int, int]) -> bool:
        alone = not self.sizes.apart and self.sizes.first != size  # with no graph of its own
        return alone and self.joined < OFTEN and size[1] <= LONG

    def _may(self, why_not: Callable[[], Note | None]) -> bool:
        """Whether nothing is in the way in layers, and nobody looks at what is inside them."""
        self.kept = why_not() or self.watch.reason()
        return self.kept is None
