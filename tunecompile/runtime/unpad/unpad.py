"""Padded and packed batches reach the layers as one row of documents: [B, T] tokens become [1, N] real ones inside each
compiled layer, and its result is [B, T, H] again.

Everything else sees the shapes it knows: embeddings, masks and tables are the model's own, and so are layers that are
not compiled by us. Nothing that is shared is changed for it. A layer learns where documents begin from the mask that
the model made, whatever function made it (`documents`), and only where its graph leaves tokens apart
(`compiler.token_wise`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.autograd import in_backward, in_checkpoint
from tunecompile._torch.modules import call_original, slot_of
from tunecompile.integrations import loss_caller
from tunecompile.integrations.kernel_functions import BOUNDARIES, knows_documents
from tunecompile.notes import Note, note
from tunecompile.runtime.step.form import PACKED, PADDED
from tunecompile.runtime.step.of_thread import of_thread
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.unpad import refusals
from tunecompile.runtime.unpad.decision import AS_IT_COMES, UnpadDecision, decide, refused_now
from tunecompile.runtime.unpad.documents import windows_of
from tunecompile.runtime.unpad.flat_batch import BOUNDS_BESIDE, FlatBatch
from tunecompile.runtime.unpad.handed_on import is_seen
from tunecompile.runtime.unpad.masks.given import bounds_in, is_given, mask_in, padding_in
from tunecompile.runtime.unpad.masks.pairs import identity, version
from tunecompile.runtime.unpad.masks.recorder import compiled_parts, recorder_for
from tunecompile.runtime.unpad.owner_call import MaskDecision, OwnerCall, PastCall, hidden_of
from tunecompile.runtime.unpad.presume import AHEAD, Presumptions
from tunecompile.runtime.unpad.rounding import Replays, Rounding

log = logging.getLogger(__name__)

LOOKS = 8  #: batches that are read on the host to say why a padded one stays so


class Unpadding:
    """Decides for the calls of one owner of layers, and keeps the reasons where batches stay as they are.

    Args:
        owner: of the layers.
        members: returns the layers that its next call is going to call.
        step: the state of the running step.
        head_is_called: whether any training step called the head.
        replays: of its layers, if any are recorded.
    """

    running: OwnerCall | None = of_thread(None)
    flat: bool = of_thread(False)  #: whether the last call left out hidden states at padding

    def __init__(
        self,
        owner: nn.Module,
        members: Callable[[], tuple[nn.Module, ...]],
        step: Step,
        head_is_called: Callable[[], bool] = lambda: True,
        replays: Replays | None = None,
    ):
        self.owner, self.members, self.step, self.head_is_called = owner, members, step, head_is_called
        self.watch = refusals.OwnerWatch(owner, members)
        self.presumptions, self.rounding = Presumptions(), Rounding(owner, members, self.watch, replays)
        self.gathered: bool | None = None  #: whether layers gather weights from other ranks; None until it is looked at
        self.notes: dict[Note, None] = {}
        self.looks = LOOKS
        self.flattened = self.packed = self.whole = 0
        self.parameters = tuple(inspect.signature(owner.forward).parameters.values())
        self.refused: Note | None = None  #: why no batch is flattened from now on
        self.masks: dict[
            Any, MaskDecision
        ] = {}  #: by identity; a checkpoint repeats a layer when the call is long over
        self.recorded = False  #: whether masks of any call were recorded in place of being made
        #: calls that left out hidden states at padding, and whose results live: their logits may be read
        self.readable: list[PastCall] = []
        self.shared = False  #: whether attention ever ran outside of compiled code, see `integrations.context_parallel`

    def call(self, args: tuple, kwargs: dict) -> Any:
        """The owner's call in a training step, flattened where that changes no gradient."""
        return self._run(OwnerCall(self._by_name(args, kwargs)), args, kwargs)

    def score(self, args: tuple, kwargs: dict) -> Any:
        """The owner's call without gradients (DPO's reference model, GRPO's old policy). It must use the same kernels
        as training: a different rounding would look like a change of the policy.
        """
        call = OwnerCall(self._by_name(args, kwargs), keeps_padding=self._why_scores_stay_padded())
        if not (self.step.scores_tokens or self.flattened + self.packed + self.whole):
            self.flat = False
            return call_original(self.owner, *args, **kwargs)
        return self._run(call, args, kwargs)

    def _why_scores_stay_padded(self) -> Note | None:
        """Scores come without padding as training steps did, and only if the head is never called, that is, where the
        caller selects labelled rows itself; or where that is known of the model's forward.
        """
        if self.step.scores_tokens or (self.flattened and not self.head_is_called()):
            return None
        return note("no-labels")

    @property
    def takes_cache(self) -> bool:
        """Whether the owner's forward knows `use_cache`."""
        return any(parameter.name == "use_cache" for parameter in self.parameters)

    def _run(self, call: OwnerCall, args: tuple, kwargs: dict) -> Any:
        self.watch.begin()
        now = refused_now(self.owner) or refusals.arguments(call.given) or refusals.weights(self.members())
        call.refused, call.rounds = self.refused or now, now is None and self.rounding.may_round(self.refused)
        if self.gathered is None:
            self.gathered = refusals.gathers(self.owner)
        if self.gathered and call.keeps_padding is None:
            call.keeps_padding = note("weights-gathered")
        before, self.running, self.flat = self.running, call, False
        self.readable = [each for each in self.readable if each.memory() is not None]
        self.masks = {mask: known for mask, known in self.masks.items() if not mask.expired()}
        try:
            with self._recording(call):
                output = call_original(self.owner, *args, **kwargs)
        except RowsRefused as found:  # before anything of this layer ran
            self.refuse(found.reason, PACKED if call.packs and not call.drops else PADDED)
            return self._run(OwnerCall(call.given), args, kwargs)
        finally:
            self.running = before
            flats = self._flats(call)
            for flat in flats:
                flat.forget()
        if not self.presumptions.hold(call.presumed):
            return self._run(OwnerCall(call.given, keeps_padding=call.keeps_padding), args, kwargs)
        if call.drops and is_seen(call.mappings.values(), call.given, output):  # zeros at padding
            self.refuse(note("output-holds-more"))
            return self._run(OwnerCall(call.given), args, kwargs)
        if call.drops:
            past = PastCall.of(args, kwargs, output, next(flat for flat in flats if flat.drops))
            self.readable += [] if past is None else [past]
        self._count(call)
        call.let_go()
        return output

    def _count(self, call: OwnerCall) -> None:
        """For the report: how a call ran, or why as it came."""
        if torch.is_grad_enabled():
            self.flattened += call.drops
            self.packed += call.packs and not call.drops
            self.whole += call.whole
            self.rounding.ran_as(call)
        if not call.decided:
            self._tell_of_call(call)

    @contextlib.contextmanager
    def _recording(self, call: OwnerCall) -> Iterator[None]:
        """Until the first layer runs, masks of long rows are recorded: layers of documents do not read them."""
        if call.refused is None and self._why_others_read_padding() is None and not compiled_parts(self.owner):
            attention = getattr(getattr(self.owner, "config", None), "_attn_implementation", None)
            mask = call.given.get("attention_mask")
            call.joins = isinstance(mask, Tensor) and mask.dim() == 2 and self.rounding.joins_by_mask(tuple(mask.shape))
            call.recorder = recorder_for(call.given.values(), attention == "eager", mask if call.joins else None)
        if call.recorder is None:
            yield
            return
        call.recorder.begin()
        try:
            yield
        finally:
            call.recorder.end()

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
            RowsRefused: layers before this one have left out what stands at padding, and it has no mask.
        """
        mask = mask_in(args, kwargs)
        rows = padding_in(args, kwargs) if mask is None and knows_documents(layer) else None
        if mask is None and (rows := bounds_in(layer, args, kwargs) if rows is None else rows) is not None:
            decision = self._known(rows) if in_backward() else self._decided(layer, rows)
            return None if decision.flat is None else (decision.flat, None)
        if mask is None and self._follows_rows(layer):
            return self.running.by_rows, None
        if mask is None:
            if self.running is not None and self.running.drops and not in_backward():  # it would read zeros at padding
                self.running.restart(note("no-mask-in-layers"))
            flat = self.rounding.batch_of(self.running, layer, args, kwargs)
            return None if flat is None else (flat, None)
        decision = self._known(mask) if in_backward() else self._decided(layer, mask)
        rows = self.running.by_rows if self.running is not None and not in_backward() else None
        if decision.flat is None and rows is not None and rows.drops:
            self.running.restart(decision.reason or note("masks-not-understood"))
        return None if decision.flat is None else (decision.flat, mask)

    def row_of(self, hidden: Any) -> tuple[FlatBatch, Tensor] | None:
        """The batch of which these hidden states are a layer's result, and the row that they were."""
        rows = ((flat, flat.row_of(hidden)) for flat in self._flats(self.running)) if self.running is not None else ()
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
        bounds = self._beside(call).get(BOUNDARIES)
        if BOUNDARIES in kwargs or not isinstance(bounds, Tensor):
            return kwargs
        call.packs = True
        return {**kwargs, BOUNDS_BESIDE: bounds}

    def _beside(self, call: OwnerCall) -> dict[str, Any]:
        if call.beside is None:
            call.beside = loss_caller.given_beside()
        return call.beside

    def _follows_rows(self, layer: nn.Module) -> bool:
        """Whether a layer without any mask, an MLP alone, say, comes behind one that had a mask [B, T].

        Its graph shows whether it may. A checkpoint of the user's would repeat it without knowing.
        """
        rows = None if self.running is None else self.running.by_rows
        return rows is not None and not in_backward() and not in_checkpoint() and knows_documents(layer)

    def _known(self, mask: Tensor) -> UnpadDecision:
        """For a checkpoint's repetition: what was decided when the layer ran first."""
        known = self.masks.get(identity(mask))
        return AS_IT_COMES if known is None else known.decision

    def _decided(self, layer: nn.Module, mask: Tensor) -> UnpadDecision:
        call = self.running
        if mask.dim() == 1 and in_checkpoint():
            return self._repeatable(layer, mask)
        if call is None or call.refused is not None:
            return AS_IT_COMES
        place = identity(mask)
        known = self.masks.get(place)
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
        call.decided, place = True, identity(mask)
        waits = self.gathered or mask.dim() <= 2
        presumed = None if waits else self.presumptions.presume(layer, mask, self.watch, call.presumed)
        if presumed is not None:
            decision = presumed[0]
            call.presumed.append(presumed[1])
        else:
            refused = call.keeps_padding or self._why_others_read_padding()
            refused = refused or refusals.router_logits(self.owner, call.given)
            decision = decide(mask, windows_of(layer), self.watch, refused, call.joins)
            self.presumptions.learn(layer, decision)
        if decision.flat is not None and (joined := self._joined(decision.flat, call)) is not None:
            decision = UnpadDecision(joined)
        if mask.dim() == 2:
            call.by_rows = decision.flat
        self.masks[place] = MaskDecision(call, version(mask), decision)
        if decision.flat is not None:
            call.drops |= decision.flat.drops
            call.packs |= not decision.flat.drops and not decision.flat.whole
            call.whole |= decision.flat.whole
            if not (decision.flat.whole or decision.flat.drops or call.given.get("cu_seq_lens_q") is not None):
                self._tell_of_states("states-cross-documents")
            self.flat |= decision.flat.drops
        elif decision.reason is not None:
            self._note(decision.reason, decision.batches)
        return decision

    def _joined(self, flat: FlatBatch, call: OwnerCall) -> FlatBatch | None:
        """The batch on the row of another mask of the call; None where there is none with these documents."""
        others = [known.decision.flat for known in self.masks.values() if known.call is call]
        rows = (flat.on_row_of(other) for other in others if other is not None)
        return next((row for row in rows if row is not None), None)

    def _tell_of_states(self, code: str) -> None:
        """Note that states cross from document to document, where layers could keep them apart."""
        if kind := next((type(layer).__name__ for layer in self.members() if knows_documents(layer)), None):
            self.notes[note(code, kind)] = None

    def _why_others_read_padding(self) -> Note | None:
        """Whether a layer that is not compiled by us is among those of the call: it would read zeros at padding."""
        for layer in self.members():
            if getattr(slot_of(layer), "padding", None) is not self:
                return note("layer-not-compiled", type(layer).__name__)
        return None

    def _by_name(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        return {**{parameter.name: value for parameter, value in zip(self.parameters, args)}, **kwargs}

    def _tell_of_call(self, call: OwnerCall) -> None:
        """Note why a batch with padding, or several documents in a row, stays as it is. A host read, so only for the
        first batches.
        """
        beside = self._beside(call)
        mask, positions = call.given.get("attention_mask"), call.given.get("position_ids")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            whole, code = mask != 0, PADDED
        elif mask is None and isinstance(positions := beside.get("position_ids", positions), Tensor):
            whole, code = positions.diff() == 1, PACKED
        else:
            return
        if self.looks and whole.dim() == 2:
            self.looks -= 1
            if not bool(whole.all()):
                self._tell_why_kept(call, code, beside)

    def _tell_why_kept(self, call: OwnerCall, code: str, beside: dict[str, Any]) -> None:
        if code == PACKED and BOUNDARIES not in call.given and not call.packs:
            kept = "position_ids" in beside and "position_ids" not in call.given
            self._tell_of_states("bounds-not-handed-on" if kept else "states-cross-documents")
        if code == PADDED or "position_ids" in call.given:
            reason = note("no-mask-in-layers" if code == PADDED else "sequences-see-each-other")
            self._note(call.refused or reason, code)

    def refuse(self, reason: Note, batches: str = PADDED) -> None:
        """From now on every batch runs as it comes."""
        self.refused, self.flat = reason, False
        self._note(reason, batches)

    def logits_are_read(self, hidden: Tensor, autocast: torch.dtype | None) -> Tensor | None:
        """Logits of a flattened call have another reader beside the loss, or a loss with other labels: padding may
        matter to it. From now on it stays.

        Args:
            hidden: what the head was called with.
            autocast: the dtype of that call's autocast; None for none.

        Returns:
            The same hidden states with what stands at padding: the owner is called once more. None where they are of no
            call that is known.
        """
        if self.flattened and not self.refused:
            self.refuse(note("logits-read"))
            log.warning("tunecompile: %s", next(reversed(self.notes)))
        past = self._past(hidden)
        if past is None:
            return None
        self.readable.remove(past)
        self.step.repeats = True
        try:
            with torch.random.fork_rng([hidden.device] if hidden.is_cuda else []):
                again = self._again(past, hidden, autocast)
        finally:
            self.step.repeats = False
        return past.with_padding(hidden, again)

    def _past(self, hidden: Tensor) -> PastCall | None:
        """The call whose result these hidden states are."""
        return next((each for each in self.readable if each.returned(hidden)), None)

    def _again(self, past: PastCall, hidden: Tensor, autocast: torch.dtype | None) -> Tensor | None:
        """The hidden states of a call, which is made once more under this autocast."""
        with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):
            return hidden_of(self._run(OwnerCall(self._by_name(past.args, past.kwargs)), past.args, past.kwargs))

    def _note(self, reason: Note, batches: str = PADDED) -> None:
        self.notes[note(batches, type(self.owner).__name__, reason)] = None

    def report(self) -> list[Note]:
        """For the report: how many batches came without padding, and why others did not."""
        told = [note("padding-removed", count=self.flattened)] if self.flattened else []
        told += [note("packed-without-mask", count=self.packed)] if self.packed else []
        return told + [note("attention-outside")] * self.shared + self.rounding.report() + list(self.notes)
