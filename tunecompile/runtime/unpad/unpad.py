"""Padded batches reach the layers without their padding: [B, T] tokens become [1, N] real ones, and the last hidden
states [B, T, H] again. Packed ones, whose positions begin anew inside a row, do so without the mask that would keep
their sequences apart.

Only the calls between the module that owns the layers and its output change, so head, loss and trainer see the shapes
they know. Attention learns where a row begins from `offsets`, through the attention interface of transformers: a
function under a name of our own, without a mask function, so that no mask is made. The models' configs carry that name
during the flattened call only.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.autograd import others_trace
from tunecompile._torch.modules import call_original
from tunecompile.integrations import loss_caller
from tunecompile.integrations.varlen_attention import INTERFACE, CannotFlatten, attention
from tunecompile.notes import Note, note
from tunecompile.runtime.unpad import packed_masks, refusals
from tunecompile.runtime.unpad.decision import PACKED, PADDED, UnpadDecision, UnpadPolicy

log = logging.getLogger(__name__)

UNPADDED = 8  #: batches that are read on the host to say why a padded one would not be flattened


class Unpadding:
    """Runs the calls of one owner of layers, flattened where its policy decides so, and keeps the reasons where not."""

    def __init__(
        self,
        owner: nn.Module,
        layers: tuple[nn.Module, ...],
        step: Any,
        head_is_called: Callable[[], bool] = lambda: True,
    ):
        self.owner, self.step = owner, step
        self.head_is_called = head_is_called  #: by any training step
        self.policy = UnpadPolicy(owner, layers)
        self.notes: dict[Note, None] = {}
        self.looks = UNPADDED
        self.flattened = self.packed = 0
        self.parameters = tuple(inspect.signature(owner.forward).parameters.values())
        self.refused = refusals.structure(owner, layers, self.parameters)
        if not self.refused:
            sys.modules["transformers"].AttentionInterface.register(INTERFACE, attention)
        found = [vars(module).get("config") for module in owner.modules()]
        self.configs = list({id(c): c for c in found if hasattr(c, "_attn_implementation_internal")}.values())
        self.shared = False  #: whether attention ever ran outside of compiled code, see `integrations.context_parallel`
        self.flat = False  #: whether the last call left out hidden states at padding

    def call(self, args: tuple, kwargs: dict) -> Any:
        """The owner's call in a training step, flattened where that changes no gradient."""
        given = self._by_name(args, kwargs)
        decision = self.decide(given)
        if decision.flat is None:
            return self._as_it_comes(given, args, kwargs)
        output = self._without_padding(decision, given, args, kwargs)
        if not self.refused:
            self.flattened += decision.drops
            self.packed += not decision.drops
        return output

    def score(self, args: tuple, kwargs: dict) -> Any:
        """The owner's call without gradients (DPO's reference model, GRPO's old policy). It must use the same kernels
        as training: a different rounding would look like a change of the policy.
        """
        given = self._by_name(args, kwargs)
        decision = self.decide(given) if self._scores_flat(given, args, kwargs) else UnpadDecision()
        self.flat = decision.drops
        if decision.flat is None:
            return call_original(self.owner, *args, **kwargs)
        return self._without_padding(decision, given, args, kwargs)

    def _scores_flat(self, given: dict, args: tuple, kwargs: dict) -> bool:
        """Whether scoring calls come without padding: as training steps did. Padding is removed only if the head is
        never called, that is, where the caller selects labelled rows itself.
        """
        takes_cache = any(parameter.name == "use_cache" for parameter in self.parameters)
        if not scores(self.owner, takes_cache, args, kwargs):
            return False
        if given.get("attention_mask") is None:
            return self.packed > 0
        return self.flattened > 0 and not self.head_is_called() and loss_caller.causal_labels()[0] is not None

    def decide(self, given: dict) -> UnpadDecision:
        """Once for each call, and noted."""
        decision = self.policy.decide(given, self.refused)
        self.flat = decision.drops
        if decision.reason and self._matters(decision.plain):
            self._note(decision.reason, decision.batches)
        return decision

    def _matters(self, plain: Tensor | None) -> bool:
        """Whether there is padding, or packing, at all. A host read, so only for the first batches."""
        if plain is None:
            return True
        if not self.looks:
            return False
        self.looks -= 1
        return not bool(plain.all())

    def _by_name(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        return {**{parameter.name: value for parameter, value in zip(self.parameters, args)}, **kwargs}

    def _without_padding(self, decision: UnpadDecision, given: dict, args: tuple, kwargs: dict) -> Any:
        try:
            with self.attention():
                return decision.flat.outputs(call_original(self.owner, **decision.flat.inputs(given)))
        except CannotFlatten as cannot:
            self.refuse(cannot.reason, PADDED if decision.drops else PACKED)
            return call_original(self.owner, *args, **kwargs)

    def _as_it_comes(self, given: dict, args: tuple, kwargs: dict) -> Any:
        """Training steps make no cache (see `EntryHook`), without which sequences would no longer see each other: a
        mask keeps it so.
        """
        tokens = packed_masks.tokens_of(given)
        packed = given.get("attention_mask") is None and given.get("position_ids") is not None and tokens is not None
        if packed and self.policy.keeps_apart(given, tokens) is False:
            return call_original(self.owner, **packed_masks.seeing_all(given, tokens))
        return call_original(self.owner, *args, **kwargs)

    def refuse(self, reason: Note, batches: str = PADDED) -> None:
        """From now on every batch runs as it comes."""
        self.refused, self.flat = reason, False
        self._note(reason, batches)

    def logits_are_read(self) -> None:
        """Logits of a flattened call have another reader beside the loss, or a loss with other labels: padding may
        matter to it.
        """
        if self.flattened and not self.refused:
            self.refuse(note("logits-read"))
            log.warning("tunecompile: %s", next(reversed(self.notes)))

    def _note(self, reason: Note, batches: str = PADDED) -> None:
        self.notes[note(batches, type(self.owner).__name__, reason)] = None

    @contextlib.contextmanager
    def attention(self, interface: str = INTERFACE) -> Iterator[None]:
        """Inside, layers call our attention function, and no mask is made."""
        before = [(config, config._attn_implementation_internal) for config in self.configs]
        for config, _ in before:
            config._attn_implementation_internal = interface
        try:
            yield
        finally:
            for config, name in before:  # another model may share the config, and be under way
                config._attn_implementation_internal = "sdpa" if name == interface else name

    def report(self) -> list[Note]:
        """For the report: how many batches came without padding, and why others did not."""
        told = [note("padding-removed", count=self.flattened)] if self.flattened else []
        told += [note("packed-without-mask", count=self.packed)] if self.packed else []
        return told + [note("attention-outside")] * self.shared + list(self.notes)


def scores(owner: nn.Module, takes_cache: bool, args: tuple, kwargs: dict) -> bool:
    """Whether this forward computes log-probabilities that are compared with those of training steps (a reference model
    in DPO, the old policy in GRPO): the same code has to compute them, or its rounding becomes part of the loss.
    Generation is recognised by its cache.
    """
    if not owner.training or torch.is_grad_enabled() or torch.is_inference_mode_enabled() or others_trace():
        return False
    if not takes_cache:
        return True
    asked = kwargs.get("use_cache")
    caches = getattr(getattr(owner, "config", None), "use_cache", True) if asked is None else asked
    return not caches and kwargs.get("past_key_values") is None and len(args) < 3


class OwnerSlot:
    """The slot of the owner, which calls of it run."""

    def __init__(self, padding: Unpadding):
        self.padding = padding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.padding.owner
        if not owner.training or others_trace():
            return call_original(owner, *args, **kwargs)
        if not torch.is_grad_enabled():
            return self.padding.score(args, kwargs)
        recovery = self.padding.step.recovery
        if recovery is None:
            return self.padding.call(args, kwargs)
        return recovery.attempt(lambda: self.padding.call(args, kwargs), restarts=True)
