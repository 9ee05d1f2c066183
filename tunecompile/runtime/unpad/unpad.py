"""Padded and packed batches reach the layers as one row of documents: [B, T] tokens become [1, N] real ones inside each
compiled layer, and its result is [B, T, H] again.

Everything else sees the shapes it knows: embeddings, masks and tables are the model's own, and so are layers that are
not compiled by us. Nothing that is shared is changed for it. A layer learns where documents begin from the mask that
the model made, whatever function made it (`documents`), and only where its graph leaves tokens apart
(`compiler.token_wise`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.modules import call_original
from tunecompile.integrations.kernel_functions import BOUNDARIES, knows_documents
from tunecompile.integrations.loss_caller import padding_is_not_pooled
from tunecompile.notes import Note, note
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.unpad import refusals
from tunecompile.runtime.unpad.batches import Batches
from tunecompile.runtime.unpad.decision import PACKED, PADDED, refused_now
from tunecompile.runtime.unpad.handed_on import is_seen
from tunecompile.runtime.unpad.masks.recorder import compiled_parts, recorder_for
from tunecompile.runtime.unpad.owner_call import OwnerCall, PastCall, hidden_of

log = logging.getLogger(__name__)

LOOKS = 8  #: batches that are read on the host to say why a padded one stays so


class Unpadding(Batches):
    """Runs the calls of one owner of layers, and keeps the reasons where batches stay as they are.

    Args:
        owner, members, step, replays: as `Batches` has them.
        head_is_called: whether any training step called the head.
    """

    def __init__(
        self,
        owner: nn.Module,
        members: Callable[[], tuple[nn.Module, ...]],
        step: Step,
        head_is_called: Callable[[], bool] = lambda: True,
        replays: GraphReplays | None = None,
    ):
        super().__init__(owner, members, step, replays)
        self.head_is_called = head_is_called
        self.looks = LOOKS
        self.flattened = self.packed = self.whole = 0
        self.parameters = tuple(inspect.signature(owner.forward).parameters.values())
        self.refused: Note | None = None  #: why no batch is flattened from now on
        #: calls that left out hidden states at padding, and whose results live: their logits may be read
        self.readable: list[PastCall] = []
        self.shared = False  #: whether attention ever ran outside of compiled code, see `integrations.context_parallel`

    def call(self, args: tuple, kwargs: dict) -> Any:
        """The owner's call in a training step, flattened where that changes no gradient."""
        return self._run(OwnerCall(self._by_name(args, kwargs)), args, kwargs)

    def score(self, args: tuple, kwargs: dict) -> Any:
        """The owner's call without gradients (DPO's reference model, GRPO's old policy, a loss that caches gradients).
        It must use the same kernels as training: a different rounding would look like a change of the policy.
        """
        pooled = padding_is_not_pooled()
        call = OwnerCall(self._by_name(args, kwargs), keeps_padding=None if pooled else self._why_scores_stay_padded())
        trained = self.flattened + self.packed + self.whole + self.prefixes.batches
        if not (self.step.scores_tokens or pooled or trained):
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

    def _run(self, call: OwnerCall, args: tuple, kwargs: dict) -> Any:
        self.watch.begin()
        now = refused_now(self.owner) or refusals.arguments(call.given) or refusals.weights(self.members())
        call.refused, call.rounds = self.refused or now, now is None and self.rounding.may_round(self.refused)
        call.waited = self.rounding.sizes.waited
        if self.gathered is None:
            self.gathered = refusals.gathers(self.owner)
        if self.gathered and call.keeps_padding is None:
            call.keeps_padding = note("weights-gathered")
        if call.refused is None:
            why_not = functools.partial(self._why_prefixes_stay, call.given)
            call.prefixes = self.prefixes.begin(call.given, why_not, lambda: any(map(knows_documents, self.members())))
        before, self.running, self.flat = self.running, call, False
        self.readable = [each for each in self.readable if each.memory() is not None]
        self.masks = {mask: known for mask, known in self.masks.items() if not mask.expired()}
        try:
            with self._recording(call):
                output = call_original(self.owner, *args, **kwargs)
        except RowsRefused as found:  # before anything of this layer ran
            if call.shared is not None and call.prefixes is not None:
                self.prefixes.refuse(found.reason)
                call.prefixes.begun.rewind()
                return self._run(OwnerCall(call.given, keeps_padding=call.keeps_padding), args, kwargs)
            self.refuse(found.reason, PACKED if call.packs and not call.drops else PADDED)
            return self._run(OwnerCall(call.given), args, kwargs)
        finally:
            self.running = before
            flats = self._flats(call)
            for flat in flats:
                flat.rows.forget()
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
            if call.shared is not None:
                self.prefixes.ran(call.shared)
            self.rounding.ran_as(call)
        if not call.decided:
            self._tell_of_call(call)

    @contextlib.contextmanager
    def _recording(self, call: OwnerCall) -> Iterator[None]:
        """Until the first layer runs, masks of long rows are recorded: layers of documents do not read them."""
        if call.refused is None and self._why_others_read_padding() is None and not compiled_parts(self.owner):
            attention = getattr(getattr(self.owner, "config", None), "_attn_implementation", None)
            mask = call.given.get("attention_mask")
            if isinstance(mask, Tensor) and mask.dim() == 2:
                call.joins = self.rounding.joins_by_mask(tuple(mask.shape)) or self._shares_by_mask(call)
            call.recorder = recorder_for(call.given.values(), attention == "eager", mask if call.joins else None)
        if call.recorder is None:
            yield
            return
        call.recorder.begin()
        try:
            yield
        finally:
            call.recorder.end()

    def _shares_by_mask(self, call: OwnerCall) -> bool:
        """Whether whole rows share prefixes, under a mask that the model would leave out. (It makes one, so that layers
        are told of branches from the first batch on.)
        """
        if call.prefixes is None or not self.rounding.attention.is_causal() or self.watch.reason() is not None:
            return False
        return call.prefixes.of_whole_rows() is not None

    def _by_name(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        return {**{parameter.name: value for parameter, value in zip(self.parameters, args)}, **kwargs}

    def _tell_of_call(self, call: OwnerCall) -> None:
        """Note why a batch with padding, or several documents in a row, stays as it is. A host read, so only for the
        first batches.
        """
        beside = call.given_beside()
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

    def report(self) -> list[Note]:
        """For the report: how many batches came without padding, and why others did not."""
        told = [note("padding-removed", count=self.flattened)] if self.flattened else []
        told += [note("packed-without-mask", count=self.packed)] if self.packed else []
        told += [*self.prefixes.report(), *[note("attention-outside")] * self.shared]
        return told + self.rounding.report() + list(self.notes)
