"""The user's gradient checkpointing: recomputed inside compiled layers, where it is torch's."""

from __future__ import annotations

from collections.abc import Sequence

from tunecompile.integrations.transformers import PassThrough, only_checkpoints
from tunecompile.notes import Note, note
from tunecompile.runtime.layer_slot import LayerSlot
from tunecompile.runtime.model_state import Part, State


class Checkpointing(Part):
    """Layers follow `gradient_checkpointing_enable` and its opposite, between any two steps."""

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        """Each layer runs the variant that recomputes inside. A function that does more than checkpoint, as
        transformers' does with
        `offload=True`, is called around the layer, unless a budget plans what is saved."""
        if not state.stacks:
            return
        planned = (state.memory is not None or bool(state.step.budgets)) and not state.checkpointed
        for slot in slots:
            slot.checkpoint, slot.checkpointed_by = bool(getattr(slot.layer, "gradient_checkpointing", False)), None
            function = slot.layer.__dict__.get("_gradient_checkpointing_func")
            if not slot.checkpoint or function is None:
                continue
            if not isinstance(function, PassThrough):
                function = slot.layer._gradient_checkpointing_func = PassThrough(function)
            if not planned and not only_checkpoints(function.function):
                slot.checkpoint, slot.checkpointed_by = False, function.function

    def notes(self, state: State) -> list[Note]:
        """Whether a function of the user's is called around compiled layers."""
        count = sum(slot.checkpointed_by is not None for slot in state.slots)
        return [note("custom-checkpointing", count=count)] if count else []

    def detach(self, state: State) -> None:
        for slot in state.slots:
            function = slot.layer.__dict__.get("_gradient_checkpointing_func")
            if isinstance(function, PassThrough):
                slot.layer._gradient_checkpointing_func = function.function
