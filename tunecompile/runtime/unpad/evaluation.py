"""Evaluation: forwards in eval mode, without gradients, for a loss. They run as scores do, by graphs without backward.

What evaluations show of batches and of their readers is kept apart from what training steps show: a training with
evaluations between its steps computes what it does without them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tunecompile._torch.modules import call_original
from tunecompile.integrations import loss_caller
from tunecompile.integrations.transformers import gives_cache, with_late_cache
from tunecompile.notes import KINDS, Note, note
from tunecompile.runtime.step.facts import takes_cache
from tunecompile.runtime.step.mode import Mode
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.unpad.owner_call import OwnerCall
from tunecompile.runtime.unpad.unpad import Unpadding

log = logging.getLogger("tunecompile")


class Evaluation(Unpadding):
    """Runs the evaluations of one owner of layers, and decides on their padding.

    Args:
        owner: of the layers.
        members: returns the layers that its next call is going to call.
        step: the state of the running step.
    """

    def __init__(self, owner: nn.Module, members: Callable[[], tuple[nn.Module, ...]], step: Step):
        super().__init__(owner, members, step)
        self.batches = 0
        self.left: dict[Note, None] = {}  #: why calls ran by the model's own code

    def runs(self, args: tuple, kwargs: dict) -> bool:
        """Whether a call in eval mode without gradients is one for a loss, and can be compiled."""
        if not loss_caller.loss_is_wanted():
            return False
        if (why := self._why_left(args, kwargs)) is not None:
            self.left[why] = None
        return why is None

    def call(self, args: tuple, kwargs: dict) -> Any:
        """The owner's call in eval mode without gradients, compiled."""
        with _plain_tensors():
            plain = tree_map_only(Tensor, lambda each: each.clone() if each.is_inference() else each, (args, kwargs))
            return self._compiled(*plain)

    def _why_left(self, args: tuple, kwargs: dict) -> Note | None:
        """Why a call for a loss runs by the model's own code."""
        if self.step.unverified:
            return note("not-verified-yet")
        if not takes_cache(self.owner):
            return None
        if kwargs.get("use_cache") or gives_cache(kwargs) or len(args) > 2:
            return note("cache-used")
        as_tuple = not kwargs.get("return_dict", getattr(getattr(self.owner, "config", None), "return_dict", True))
        return note("cache-in-tuple") if as_tuple and self._makes_cache(kwargs) else None

    def _makes_cache(self, kwargs: dict) -> bool:
        """Whether the model's own code would make a cache that nobody requested."""
        by_default = getattr(getattr(self.owner, "config", None), "use_cache", False)
        return takes_cache(self.owner) and kwargs.get("use_cache") is None and bool(by_default)

    def _compiled(self, args: tuple, kwargs: dict) -> Any:
        keeps = note("logits-read") if loss_caller.logits_are_wanted() else None
        output = self._run(OwnerCall(self._by_name(args, kwargs), keeps_padding=keeps), args, kwargs)
        self.batches += 1
        if not self._makes_cache(kwargs):
            return output
        state = self._weights()
        return with_late_cache(output, lambda name: self._late(state, lambda: self._cache(name, args, kwargs)))

    def _count(self, call: OwnerCall) -> None:
        """Of no interest in an evaluation, whose padding stays for the reasons of training steps."""

    def logits_are_read(self, hidden: Tensor, autocast: torch.dtype | None) -> Tensor | None:
        """Somebody reads logits of a call without padding. From now on evaluations keep it.

        Returns:
            The same hidden states with what stands at padding; None where they are not known.
        """
        self.refused = self.refused or note("logits-read")
        past = self._past(hidden)
        if past is None:
            return None

        def again() -> Tensor | None:
            self.step.repeats, self.step.mode = True, Mode.EVALUATE
            return self._again(past, hidden, autocast)

        return self._late(None, again)

    def _cache(self, name: str, args: tuple, kwargs: dict) -> Any:
        self.step.mode = Mode.EAGER
        return getattr(call_original(self.owner, *args, **{**kwargs, "use_cache": True}), name)

    def _late(self, state: int | None, make: Callable[[], Any]) -> Any:
        """What somebody reads of an evaluation that is over, made now, as the model was then.

        state: of the weights then.
        """
        if state is not None and state != self._weights():
            log.warning("tunecompile: %s. %s", note("cache-read-late"), KINDS["cache-read-late"].mend)
        trains = [module for module in self.owner.modules() if module.training]
        step, names = self.step, ("mode", "repeats", "makes_cache")
        before = {name: getattr(step, name) for name in names}
        try:
            for module in trains:
                module.training = False
            with _plain_tensors():
                return make()
        finally:
            for module in trains:
                module.training = True
            for name, value in before.items():
                setattr(step, name, value)

    def _weights(self) -> int:
        """A number that changes where trained weights do."""
        return sum(parameter._version for parameter in self.owner.parameters() if parameter.requires_grad)

    def report(self) -> list[Note]:
        """For the report: how many batches ran compiled, and why others did not."""
        told = [note("evaluation-compiled", count=self.batches)] if self.batches else []
        return told + [note("evaluation-left", detail=why) for why in self.left]


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Without gradients, and outside of inference mode, whose tensors Dynamo would trace apart."""
    with torch.inference_mode(False), torch.no_grad():
        yield
