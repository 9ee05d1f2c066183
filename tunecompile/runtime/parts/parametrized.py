"""Adapters over parameters, and 4-bit stacks of experts, which parametrise modules: traced without that, or skipped."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tunecompile.integrations.packed_experts.stacks import packed_stacks
from tunecompile.integrations.peft import parametrize
from tunecompile.notes import Note
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.model_state import Part, State


class ParametrizedModules(Part):
    """Such modules inside layers are traced, or run as they are."""

    def __init__(self) -> None:
        self.modules: dict[int, list[nn.Module]] = {}  #: by the layer's place
        self.looked: dict[int, object] = {}  #: what was inside then

    def attach(self, state: State) -> None:
        for slot in state.slots:
            self._look(slot)

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        """Adapters and 4-bit stacks may have come since."""
        for slot in state.slots:
            # layers are looked at within the first step: until then, and once more behind it, nobody tells of changes
            if slot.inside is None or self.looked[slot.place] is not slot.inside:
                self._undo(slot.place)
                self._look(slot)

    def _look(self, slot: LayerSlot) -> None:
        found = parametrize.trace_or_skip(slot.layer)
        self.modules[slot.place], self.looked[slot.place] = found, slot.inside
        if not slot.region.packed and any(packed_stacks(module) for module in slot.layer.modules()):
            slot.region.packed = True
            slot.region.variants.clear()

    def _undo(self, place: int) -> None:
        for module in self.modules[place]:
            parametrize.undo(module)

    def notes(self, state: State) -> list[Note]:
        return parametrize.report_lines([module for found in self.modules.values() for module in found])

    def detach(self, state: State) -> None:
        for place in self.modules:
            self._undo(place)
