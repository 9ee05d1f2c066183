"""Adapters over parameters, which parametrise modules at every call: traced without that, or skipped by Dynamo."""

from __future__ import annotations

from torch import nn

from tunecompile.integrations import peft_parametrize
from tunecompile.notes import Note
from tunecompile.runtime.model_state import Part, State


class ParametrizedModules(Part):
    """Such modules inside layers are traced, or run as they are."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def attach(self, state: State) -> None:
        if state.stacks:
            self.modules = [module for slot in state.slots for module in peft_parametrize.trace_or_skip(slot.layer)]

    def notes(self, state: State) -> list[Note]:
        return peft_parametrize.report_lines(self.modules)

    def detach(self, state: State) -> None:
        for module in self.modules:
            peft_parametrize.undo(module)
