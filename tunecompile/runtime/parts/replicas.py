"""Replicas of `nn.DataParallel` share the original's slots, which would call the original's layers: they run without
us.
"""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from tunecompile._torch.modules import fill_own
from tunecompile.notes import Note, note
from tunecompile.runtime.model_state import Part, State
from tunecompile.runtime.step.state import NotCopied


class Replicas(Part):
    """Empties the slots of each replica."""

    def __init__(self) -> None:
        self.seen = False  #: whether any ran
        self.handle: RemovableHandle | None = None

    def attach(self, state: State) -> None:
        if state.stacks:
            self.handle = state.model.register_forward_pre_hook(ReplicaHook(state))

    def notes(self, state: State) -> list[Note]:
        return [note("replicas")] if self.seen else []

    def detach(self, state: State) -> None:
        if self.handle is not None:
            self.handle.remove()


class ReplicaHook(NotCopied):
    """Forward pre-hook of the optimized model."""

    def __init__(self, state: State):
        self.state = state

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if getattr(module, "_is_replica", False):
            self.state.part(Replicas).seen = True
            for part in module.modules():  # replicas are shallow copies: the original keeps its slots
                fill_own(part, None)
