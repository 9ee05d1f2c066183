"""Frozen dense weights under adapters move into one matrix a product, and back."""

from __future__ import annotations

from tunecompile.runtime.model_state import ModelCall, Part, State

MOVES_ON = (["cuda"],)  #: types of devices on which dense weights move: all of them are on one


class DenseWeights(Part):
    """See `runtime.memory.weight_move`."""

    def before_step(self, state: State, call: ModelCall) -> None:
        """Whether they may move is decided at the first training step."""
        if state.kept.moves is None:
            devices = {parameter.device for slot in state.slots for parameter in slot.layer.parameters()}
            movable = state.precision is None and [device.type for device in devices] in MOVES_ON
            state.kept.moves = movable and all(slot.stays for slot in state.slots)
        state.kept.expect()

    def detach(self, state: State) -> None:
        state.kept.move_out()
