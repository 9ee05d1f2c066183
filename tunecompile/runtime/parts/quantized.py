"""4-bit linears, which bitsandbytes would pack in an evaluation on a CPU."""

from __future__ import annotations

from torch import nn

from tunecompile.integrations import bitsandbytes
from tunecompile.runtime.model_state import Part, State


class QuantizedLinears(Part):
    """They stay as gradients can pass them."""

    def __init__(self) -> None:
        self.unpacked: list[nn.Module] = []

    def attach(self, state: State) -> None:
        self.unpacked = bitsandbytes.keep_unpacked(state.model)
        state.notes += bitsandbytes.note_packed(state.model)

    def detach(self, state: State) -> None:
        for module in self.unpacked:
            bitsandbytes.may_pack(module)
