"""`generate` of the model, recorded token by token."""

from __future__ import annotations

from tunecompile.integrations.generation import generates
from tunecompile.notes import Note
from tunecompile.runtime.model_state import Part, State
from tunecompile.runtime.rollouts.generate_slot import GenerateSlot
from tunecompile.runtime.rollouts.loop import Loop


class Rollouts(Part):
    """The slot in `generate` of the model below adapters."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.slot: GenerateSlot | None = None

    def attach(self, state: State) -> None:
        base = state.base()
        if state.settings.generate and state.stacks and generates(base):
            self.loop = Loop(state)
            self.slot = GenerateSlot(base, self.loop)

    def notes(self, state: State) -> list[Note]:
        """How often it ran, and why it did not."""
        return [] if self.loop is None else self.loop.notes()

    def detach(self, state: State) -> None:
        if self.slot is not None:
            self.slot.empty()
            self.slot = None
