"""What is inside a layer: hooks, parameters and buffers of its modules, which are walked anew only where one came, went or took another's place.

Adapters come, are merged and go, and `torch.func.functional_call` has other weights in place for the length of a call. To walk a layer with adapters, 83 modules,
takes 0.1 ms; what is asked here at every step or call a tenth of that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tunecompile._torch.modules import HOOKS
from tunecompile.integrations.loss_caller import home_of


class ModuleSnapshot:
    """A look at a layer's modules. The dictionaries are the modules' own: what they hold is what is there now. Of a module that is gone they are let go, its
    weights with them."""

    def __init__(self, layer: nn.Module):
        modules = list(layer.modules())
        self.hooks: list[dict] = [getattr(part, name) for part in modules for name in HOOKS]
        self.own: list[dict] = [vars(part) for part in modules]
        self.weights: list[dict] = [part._parameters for part in modules]
        self.buffered: list[dict] = [part._buffers for part in modules]
        self.children: list[dict] = [part._modules for part in modules]
        self.seen = [{name: self._known(child) for name, child in children.items()} for children in self.children]

    def _known(self, child: nn.Module | None) -> Any:
        """What equals the child, and does not keep it."""
        looked = (self.own, self.weights, self.buffered, self.children)
        return child if child is None else weakref.proxy(child, lambda _: [part.clear() for part in looked])

    @property
    def changed(self) -> bool:
        """Whether this look is no longer true. (Compared in C.)"""
        return self.children != self.seen

    @property
    def collected(self) -> bool:
        """Whether transformers collects what modules return by functions in place of their forwards, which 5.0 puts there for the length of a call. Later versions have hooks."""
        return any("forward" in own and home_of(own["forward"]) == "transformers.utils.generic" for own in self.own)

    def owns(self, weights: Sequence[Tensor]) -> bool:
        """Whether they are parameters that are in place now."""
        return {id(weight) for weight in weights} <= {
            id(parameter) for held in self.weights if held for parameter in held.values()
        }

    def buffers(self) -> list[Tensor]:
        """Those that are in place now."""
        return [buffer for held in self.buffered if held for buffer in held.values() if buffer is not None]
