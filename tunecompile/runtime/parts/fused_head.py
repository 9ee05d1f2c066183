"""TRL's fused head, which computes scores of tokens from the head's weight: ours in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tunecompile.integrations import trl
from tunecompile.notes import Note, note
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.loss_head.fused_forward import FusedForward
from tunecompile.runtime.model_state import Part, State
from tunecompile.runtime.step.state import NotCopied


class FusedHead(Part):
    """TRL's trainers set a forward after `optimize`, and accelerate wraps it when the training begins, so it is looked
    for at every call: before adapters call their model's forward, and where the layers begin, for the next call."""

    def __init__(self) -> None:
        self.found: list[FusedForward] = []
        self.handle: RemovableHandle | None = None

    def attach(self, state: State) -> None:
        if not state.heads:
            return
        if state.model is not state.base():
            self.handle = state.model.register_forward_pre_hook(_Entry(self, state))
        self.follow(state, ())

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        base = state.base()
        forward = base.__dict__.get("forward")
        if forward is None or not state.heads or trl.fused_head(forward) is None:
            return
        for each in self.found:
            each.active = False  # below what was found now, if anywhere
        self.found.append(FusedForward(base, state.step, state.heads[0]))
        base.forward = self.found[-1].method

    def notes(self, state: State) -> list[Note]:
        """Why scores are TRL's own."""
        return [note("fused-head-left", detail=reason) for each in self.found for reason in each.refused]

    def detach(self, state: State) -> None:
        if self.handle is not None:
            self.handle.remove()
        for each in reversed(self.found):
            each.active = False
            if (base := each.model()) is not None and base.__dict__.get("forward") is each.method:
                base.forward = each.before
        self.found.clear()


class _Entry(NotCopied):
    """Forward pre-hook of a wrapper around the model."""

    def __init__(self, part: FusedHead, state: State):
        self.part, self.state = part, state

    def __call__(self, module: nn.Module, args: tuple) -> Any:
        self.part.follow(self.state, ())
