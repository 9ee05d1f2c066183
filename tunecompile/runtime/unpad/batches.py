"""In which form layers get their batch: as it comes, or as one row of documents. Decided once for each mask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.autograd import in_backward, in_checkpoint
from tunecompile._torch.modules import slot_of
from tunecompile.integrations.kernel_functions import BOUNDARIES, knows_documents
from tunecompile.notes import Note, note
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.step.of_thread import of_thread
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.unpad import refusals
from tunecompile.runtime.unpad.decision import AS_IT_COMES, PADDED, UnpadDecision, decide
from tunecompile.runtime.unpad.documents import windows_of
from tunecompile.runtime.unpad.flat_batch import BOUNDS_BESIDE, FlatBatch, HasNoTokens
from tunecompile.runtime.unpad.masks.given import bounds_in, is_given, mask_in, padding_in
from tunecompile.runtime.unpad.masks.pairs import identity, version
from tunecompile.runtime.unpad.masks.presume import AHEAD, Presumptions
from tunecompile.runtime.unpad.owner_call import MaskDecision, OwnerCall
from tunecompile.runtime.unpad.prefixes.search import PrefixSearch
from tunecompile.runtime.unpad.rounding.rounding import Rounding


class Batches:
    """Decides for the layers of one owner.

    Args:
        owner: of the layers.
        members: returns the layers that its next call is going to call.
        step: the state of the running step.
        replays: of its layers, if any are recorded.
    """

    running: OwnerCall | None = of_thread(None)
    flat: bool = of_thread(False)  #: whether the last call left out hidden states at padding

    def __init__(
        self,
        owner: nn.Module,
        members: Callable[[], tuple[nn.Module, ...]],
        step: Step,
        replays: GraphReplays | None = None,
    ):
        self.owner, self.members, self.step = owner, members, step
        self.watch = refusals.OwnerWatch(owner, members)
        self.presumptions, self.rounding = Presumptions(), Rounding(owner, members, self.watch, replays)
        self.prefixes = PrefixSearch()
        self.gathered: bool | None = None  #: whether layers gather weights from other ranks; None until it is looked at
        self.notes: dict[Note, None] = {}
        self.masks: dict[
            Any, MaskDecision
        ] = {}  #: by identity; a checkpoint repeats a layer when the call is long over
        self.recorded = False  #: whether masks of any call were recorded in place of being made

    def begin_layers(self) -> None:
        """A layer is about to run."""
        if self.running is not None and self.running.recorder is not None:
            self.running.recorder.end()
            self.recorded |= self.running.recorder.records > 0

    def layer_ran(self) -> None:
        """A layer was launched: while the device is at it, the host can have a presumed mask read."""
        if self.running is None or not self.running.presumed:
            return
        self.running.ran += 1
        if self.running.ran >= AHEAD and (unread := [each for each in self.running.presumed if each.mask is not None]):
            unread[0].read()

    def batch_of(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[FlatBatch, Tensor | None] | None:
        """The batch of a layer's call without its padding, and the mask that says so, if it is of all pairs of tokens.

        None where the batch stays as it is.

        Raises:
            RowsRefused: layers before this one have left out what stands at padding, and it has no mask; or rows that
                begin alike do not reach the layers alike.
        """
        found = self._batch_of(layer, args, kwargs)
        call = self.running
        if found is None or found[0].shared is None or call is None or call.shared is not None or in_backward():
            return found
        flat, mask = found
        call.shared = flat.shared
        if call.prefixes is not None and call.prefixes.must_be_checked() and copies_differ(flat, args, kwargs, mask):
            raise RowsRefused(note("copies-differ"))
        return found

    def _batch_of(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[FlatBatch, Tensor | None] | None:
        mask = mask_in(args, kwargs)
        rows = padding_in(args, kwargs) if mask is None and knows_documents(layer) else None
        if mask is None and (rows := bounds_in(layer, args, kwargs) if rows is None else rows) is not None:
            decision = self._decided(layer, rows)
            return None if decision.flat is None else (decision.flat, None)
        if mask is None and self._follows_rows(layer):
            return self.running.by_rows, None
        if mask is None:
            if self.running is not None and self.running.drops and not in_backward():  # it would read zeros at padding
                raise RowsRefused(note("no-mask-in-layers"))
            flat = self.rounding.batch_of(self.running, layer, args, kwargs)
            return None if flat is None else (flat, None)
        decision = self._decided(layer, mask)
        rows = self.running.by_rows if self.running is not None and not in_backward() else None
        if decision.flat is None and rows is not None and rows.drops:
            raise RowsRefused(decision.reason or note("masks-not-understood"))  # it would read zeros at padding
        return None if decision.flat is None else (decision.flat, mask)

    def row_of(self, hidden: Any) -> tuple[FlatBatch, Tensor] | None:
        """The batch of which these hidden states are a layer's result, and the row that they were."""
        rows = (
            ((flat, flat.rows.row_of(hidden)) for flat in self._flats(self.running)) if self.running is not None else ()
        )
        return next(((flat, row) for flat, row in rows if row is not None), None)

    def _flats(self, call: OwnerCall) -> list[FlatBatch]:
        found = [*(known.decision.flat for known in self.masks.values()), call.rounded]
        return [flat for flat in found if flat is not None]

    def with_bounds(self, layer: nn.Module, kwargs: dict) -> dict:
        """A layer's arguments, with the bounds of documents that the model was given and kept from its layers.

        (A checkpoint of the user's would repeat the layer without knowing. A re-entrant one runs it without gradients.)
        """
        call, repeated = self.running, in_backward() or in_checkpoint() or not torch.is_grad_enabled()
        if call is None or BOUNDARIES in call.given or not knows_documents(layer) or repeated:
            return kwargs
        bounds = call.given_beside().get(BOUNDARIES)
        if BOUNDARIES in kwargs or not isinstance(bounds, Tensor):
            return kwargs
        call.packs = True
        return {**kwargs, BOUNDS_BESIDE: bounds}

    def _follows_rows(self, layer: nn.Module) -> bool:
        """Whether a layer without any mask, an MLP alone, say, comes behind one that had a mask [B, T].

        Its graph shows whether it may. A checkpoint of the user's would repeat it without knowing.
        """
        rows = None if self.running is None else self.running.by_rows
        return rows is not None and not in_backward() and not in_checkpoint() and knows_documents(layer)

    def _decided(self, layer: nn.Module, mask: Tensor) -> UnpadDecision:
        call, known = self.running, self.masks.get(identity(mask))
        if in_backward():  # a checkpoint repeats the layer, which runs as it did
            return AS_IT_COMES if known is None else known.decision
        if mask.dim() == 1 and in_checkpoint():
            return self._repeatable(layer, mask)
        if call is None or call.refused is not None:
            return AS_IT_COMES
        if known is not None and known.call is call and known.version == version(mask):
            return known.decision
        if in_checkpoint() and is_given(mask, call.given):  # it may come again, in a call of other labels
            return AS_IT_COMES
        return self._decide(layer, mask, call)

    def _repeatable(self, layer: nn.Module, bounds: Tensor) -> UnpadDecision:
        """What is decided of bounds of documents once, for all calls: a checkpoint repeats layers of an earlier one."""
        call, known = self.running, self.masks.get(identity(bounds))
        if known is None or known.version != version(bounds):
            decided = AS_IT_COMES if call is None or call.refused is not None else self._decide(layer, bounds, call)
            known = self.masks[identity(bounds)] = MaskDecision(call, version(bounds), decided)
        if call is not None:
            call.decided = True
            call.packs |= known.decision.flat is not None
        return known.decision

    def _decide(self, layer: nn.Module, mask: Tensor, call: OwnerCall) -> UnpadDecision:
        call.decided = True
        waits = self.gathered or mask.dim() <= 2 or call.prefixes is not None
        presumed = None if waits else self.presumptions.presume(layer, mask, self.watch, call.presumed)
        if presumed is not None:
            decision = presumed[0]
            call.presumed.append(presumed[1])
        else:
            refused = call.keeps_padding or self._why_others_read_padding()
            refused = refused or refusals.router_logits(self.owner, call.given)
            decision = decide(mask, windows_of(layer), self.watch, refused, call.joins, call.prefixes, call.waited)
            self.presumptions.learn(layer, decision)
        if decision.flat is not None:
            others = [known.decision.flat for known in self.masks.values() if known.call is call]
            joined = (decision.flat.on_row_of(other) for other in others if other is not None)
            decision = next((UnpadDecision(row) for row in joined if row is not None), decision)
        if mask.dim() == 2:
            call.by_rows = decision.flat
        self.masks[identity(mask)] = MaskDecision(call, version(mask), decision)
        if decision.flat is not None:
            call.drops |= decision.flat.drops
            call.packs |= not (decision.flat.drops or decision.flat.whole or decision.flat.shared is not None)
            call.whole |= decision.flat.whole
            if decision.flat.packs and call.given.get("cu_seq_lens_q") is None:
                self._tell_of_states("states-cross-documents")
            self.flat |= decision.flat.drops
        elif decision.reason is not None:
            self._note(decision.reason, decision.batches)
        return decision

    def _tell_of_states(self, code: str) -> None:
        """Note that states cross from document to document, where layers could keep them apart."""
        if kind := next((type(layer).__name__ for layer in self.members() if knows_documents(layer)), None):
            self.notes[note(code, kind)] = None

    def _why_prefixes_stay(self, given: dict[str, Any]) -> Note | None:
        """Why prefixes that rows share are computed in each of them, as far as modules and arguments tell."""
        if self.gathered:
            return note("weights-gathered")
        return refusals.wants_router_logits(self.owner, given)

    def _why_others_read_padding(self) -> Note | None:
        """Whether a layer that is not compiled by us is among those of the call: it would read zeros at padding."""
        for layer in self.members():
            if getattr(slot_of(layer), "padding", None) is not self:
                return note("layer-not-compiled", type(layer).__name__)
        return None

    def _note(self, reason: Note, batches: str = PADDED) -> None:
        self.notes[note(batches, type(self.owner).__name__, reason)] = None


def copies_differ(flat: FlatBatch, args: tuple, kwargs: dict, mask: Tensor | None) -> bool:
    """Whether rows that share tokens differ there in any of a layer's arguments. It waits for the device.

    Args:
        flat: of these rows.
        args, kwargs: of the layer, for the batch.
        mask: the one among them that was read.
    """
    given = [each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, tuple) else (value,))]
    for value in given:
        if not isinstance(value, Tensor) or not value.dim() or value is mask:
            continue
        for places, tokens in flat.shared.again if flat.shared is not None else ():
            with contextlib.suppress(HasNoTokens):
                if not torch.equal(flat.at(value, places), flat.at(value, flat.index[tokens])):
                    return True
    return False
