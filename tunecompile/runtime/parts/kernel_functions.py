"""Functions that Dynamo cannot trace, or with kernels of other packages behind them: what is traced in their place."""

from __future__ import annotations

from collections.abc import Sequence

from tunecompile.integrations.kernel_functions import Substitution, substitute, trace_by_bounds
from tunecompile.integrations.peft import trace as peft
from tunecompile.notes import Note
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.model_state import Part, State


class KernelFunctions(Part):
    """Looked for once: files of models do not change, and a function that is replaced is another one to Dynamo."""

    def __init__(self) -> None:
        self.found: list[Substitution] | None = None

    def attach(self, state: State) -> None:
        self.follow(state, ())

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        if self.found is None:
            kinds = {type(module) for module in state.model.modules()}
            found = substitute(kinds)
            self.found = None if found is None else [*found, *trace_by_bounds(kinds)]

    def notes(self, state: State) -> list[Note]:
        return [each.refused for each in self.found or () if each.refused is not None]


class PeftFunctions(Part):
    """Of PEFT, which may be imported after `optimize`: looked for at every step."""

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        peft.substitute()
