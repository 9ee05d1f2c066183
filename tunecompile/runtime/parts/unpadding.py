"""Padded and packed batches reach the layers as one row of real tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tunecompile._torch.modules import empty, fill, slot_of
from tunecompile.integrations.loss_caller.sentence_transformers import called_by_forward
from tunecompile.notes import Note, note
from tunecompile.runtime.layers.find_layers import LayerStack
from tunecompile.runtime.layers.forward_caller import ForwardCaller
from tunecompile.runtime.layers.owner_slot import OwnerSlot
from tunecompile.runtime.model_state import Part, State
from tunecompile.runtime.parts.loss_head import unused_heads
from tunecompile.runtime.unpad.evaluation import Evaluation
from tunecompile.runtime.unpad.unpad import Unpadding


class PaddingRemoval(Part):
    """The slots of the modules that own layers, and of those that call them by their `forward`."""

    def __init__(self) -> None:
        self.callers: list[ForwardCaller] = []

    def attach(self, state: State) -> None:
        for stack in state.stacks:
            slot = slot_of(stack.owner)
            if slot is None:
                padding = Unpadding(
                    stack.owner, members_of(stack), state.step, lambda: _head_is_called(state), state.replays
                )
                evaluation = Evaluation(stack.owner, members_of(stack), state.step)
                fill(stack.owner, OwnerSlot(padding, evaluation))
                state.paddings.append(padding)
                state.evaluations.append(evaluation)
                for layer in state.slots:
                    layer.paddings = (padding, evaluation) if layer.layer in stack.members else layer.paddings
                beside = {*stack.owner.children()}
                for norm in state.norms:
                    norm.before = (padding, evaluation) if norm.layer in beside else norm.before
            elif isinstance(slot, OwnerSlot):
                slot.padding.refused = slot.evaluation.refused = note("one-owner-several-lists")
        owners = {padding.owner for padding in state.paddings}
        for module in state.model.modules():
            if (owner := called_by_forward(module)) in owners and slot_of(module) is None:
                self.callers.append(ForwardCaller(module, owner, len(owner._forward_pre_hooks)))
                fill(module, self.callers[-1])

    def notes(self, state: State) -> list[Note]:
        return [each for padding in (*state.paddings, *state.evaluations) for each in padding.report()]

    def detach(self, state: State) -> None:
        for caller in self.callers:
            empty(caller.module, caller)
        for padding in state.paddings:
            if isinstance(slot := slot_of(padding.owner), OwnerSlot):
                empty(padding.owner, slot)


def members_of(stack: LayerStack) -> Callable[[], tuple[nn.Module, ...]]:
    """A function that returns the layers of a stack as they are now: they may have been replaced."""
    name = stack.path.rpartition(".")[2]

    def members() -> tuple[nn.Module, ...]:
        now = getattr(stack.owner, name, None)
        return tuple(now) if isinstance(now, nn.ModuleList) else stack.members

    return members


def _head_is_called(state: State) -> bool:
    """Whether a training step has called it, as far as there is one to be called."""
    return not state.heads or len(unused_heads(state)) < len(state.heads)
