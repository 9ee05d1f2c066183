"""The user's gradient checkpointing: recomputed inside compiled layers, where it is torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from tunecompile._torch.modules import checkpoints, slot_of
from tunecompile.integrations.diffusers import is_checkpoint_of_owner
from tunecompile.integrations.transformers import PassThrough, only_checkpoints
from tunecompile.notes import Note, note
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.model_state import Part, State

OF_LAYER, OF_WRAPPER = "_gradient_checkpointing_func", "checkpoint_fn"  #: attributes that hold the function


class Checkpointing(Part):
    """Layers follow `gradient_checkpointing_enable` and its opposite, between any two steps, and torch's wrapper."""

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        """Each layer runs the variant that recomputes inside. A function that does more than checkpoint, as
        transformers' does with
        `offload=True`, is called around the layer, unless a budget plans what is saved."""
        if not state.stacks:
            return
        planned = (state.memory is not None or bool(state.step.budgets)) and not state.checkpointed
        for slot in slots:
            slot.checkpoint, slot.checkpointed_by = bool(getattr(slot.layer, "gradient_checkpointing", False)), None
            if checkpoints(slot.layer):
                slot.checkpoint |= _is_inside(slot.layer)
                continue
            if not slot.checkpoint:
                slot.checkpoint = _is_around(slot)
                continue
            function = slot.layer.__dict__.get(OF_LAYER)
            if function is None:
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
            for module, name in ((slot.layer, OF_LAYER), (slot.layer, OF_WRAPPER), (slot.owner, OF_LAYER)):
                if isinstance(function := vars(module).get(name) if module is not None else None, PassThrough):
                    setattr(module, name, function.function)


class InWrapper(PassThrough):
    """Stands in the `checkpoint_fn` of torch's wrapper, which is called with the layer's own arguments by name."""

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class AroundLayers(PassThrough):
    """Stands in the checkpointing function of a module that owns layers, and calls it with each of them, or others."""

    def __call__(self, function: Callable, *args: Any, **options: Any) -> Any:
        slot = slot_of(function) if isinstance(function, nn.Module) else None
        return (function if isinstance(slot, LayerSlot) else partial(self.function, function))(*args, **options)


def _is_around(slot: LayerSlot) -> bool:
    """Whether the owner of a layer checkpointed it (diffusers), so that it is recomputed inside from now on."""
    owner = slot.owner
    function = vars(owner).get(OF_LAYER) if getattr(owner, "gradient_checkpointing", False) else None
    if owner is not None and function is not None and is_checkpoint_of_owner(function):
        function = owner._gradient_checkpointing_func = AroundLayers(function)
    return isinstance(function, AroundLayers)


def _is_inside(wrapper: nn.Module) -> bool:
    """Whether a layer is recomputed inside its compiled code from now on, and not by the function of its wrapper.

    (A function that does more than torch's stays, and is compiled with the layer.)
    """
    function = vars(wrapper)[OF_WRAPPER]
    if not isinstance(function, PassThrough) and only_checkpoints(function):
        function = wrapper.checkpoint_fn = InWrapper(function)
    return isinstance(function, PassThrough)
