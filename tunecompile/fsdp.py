"""Layers whose weights FSDP2 gathers for each call (`fully_shard`).

Its hooks gather a unit's weights before its forward, free them behind it, gather them again before its backward, and send gradients behind that. All that
is sent is sent by these hooks. So they are called around the compiled layer, and between them the layer is one process's own matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from torch import nn

from tunecompile._torch import fsdp_groups
from tunecompile.around import aside, call_around


@dataclass(frozen=True)
class Unit:
    """A layer that `fully_shard` was called for, and for nothing inside of it."""

    layer: nn.Module
    refused: str = ""

    def around(self, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """What the layer's hooks make of a call, with `run` for its forward."""
        return call_around(self.layer, run, args, kwargs)

    def call(self, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """`run`, to which the layer has no hooks."""
        with aside(self.layer):
            return run(args, kwargs)


def unit(layer: nn.Module) -> Unit | None:
    """None where `fully_shard` was not called for this layer, or for modules inside as well, which gather while it runs."""
    if fsdp_groups(layer) is None or any(fsdp_groups(module) is not None for module in layer.modules() if module is not layer):
        return None
    return Unit(layer)
