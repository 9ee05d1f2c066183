"""Functions of PEFT that Dynamo cannot trace get traceable substitutes."""

from __future__ import annotations

from collections.abc import Sequence

from tunecompile.integrations.peft.trace import substitute
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.model_state import Part, State


class PeftFunctions(Part):
    """Looked for at every step: PEFT may be imported after `optimize`."""

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        substitute()
