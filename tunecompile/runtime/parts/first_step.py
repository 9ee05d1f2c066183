"""`optimize(verify=True)`: the first training step is verified before it is taken."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tunecompile._torch.autograd import others_trace
from tunecompile.errors import CannotVerify, summary
from tunecompile.notes import Note, note
from tunecompile.runtime.model_state import Part, State, Verify
from tunecompile.runtime.step.state import NotCopied

log = logging.getLogger("tunecompile")
VERIFIED = "verified"  #: topic of the ranks' store: whether a rank's first step is right, and a line about it


class FirstStepCheck(Part):
    """Verifies one step by the function that `optimize` was given."""

    def __init__(self) -> None:
        self.verify: Verify | None = None  #: until it was called
        self.handle: RemovableHandle | None = None

    def attach(self, state: State) -> None:
        self.verify = state.settings.verify
        state.step.unverified = self.verify is not None
        if self.verify is not None and state.stacks:  # a model that is one region asks by itself
            self.handle = state.model.register_forward_pre_hook(VerifyHook(state), with_kwargs=True)

    def check(self, state: State, args: tuple, kwargs: dict) -> None:
        """Before the model's call, if it is a training step and the first one."""
        if self.verify is None or not state.model.training or not torch.is_grad_enabled() or others_trace():
            return
        verify, self.verify, state.step.unverified = self.verify, None, False
        try:
            result = verify(state.model, {**_by_name(state.model, args), **kwargs})
        except Exception as error:  # training goes on as it would have
            log.debug("the first step could not be verified", exc_info=True)
            state.notes.append(note("not-verified", detail=summary(error)))
            state.store.publish(VERIFIED, [False, state.notes[-1]])
            return
        state.notes.append(note("verified", detail=result.summary()))
        state.store.publish(VERIFIED, [result.passed, result.summary()])
        if not result.passed:
            log.warning("%s", result)

    def notes(self, state: State) -> list[Note]:
        """How the first step was on other ranks."""
        if not state.has_store:
            return []
        store = state.store
        others = [(rank, *told) for rank, told in store.published(VERIFIED).items() if rank != store.rank]
        broken = "; ".join(f"rank {rank}: {told}" for rank, passed, told in others if not passed)
        if not others:
            return []
        told = broken or note("right-on-ranks")
        return [note("verified-on-ranks", detail=told, count=len(others), ranks=store.ranks - 1)]

    def detach(self, state: State) -> None:
        if self.handle is not None:
            self.handle.remove()


def _by_name(model: nn.Module, args: tuple) -> dict[str, Any]:
    """Positional arguments of a call.

    Raises:
        CannotVerify: the forward takes `*args`.
    """
    parameters = inspect.signature(model.forward).parameters.items()
    names = [name for name, p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(names):
        raise CannotVerify(reason="the model's arguments have no names")
    return dict(zip(names, args))


class VerifyHook(NotCopied):
    """Forward pre-hook of the optimized model."""

    def __init__(self, state: State):
        self.state = state

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module is self.state.model:
            self.state.part(FirstStepCheck).check(self.state, args, kwargs)
