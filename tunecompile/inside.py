"""Which modules are inside a layer, and where they keep their hooks: noticed anew where one came, went or took another's place."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from tunecompile._torch import HOOKS


class Inside:
    """A look at a module and those inside it. Whether it is still true is asked at every step, and compared in C therefore: 0.15 ms for 32 layers of 83 modules."""

    def __init__(self, module: nn.Module):
        modules = list(module.modules())
        self.hooks: list[dict] = [getattr(part, name) for part in modules for name in HOOKS]
        self.children: list[dict] = [part._modules for part in modules]
        self.seen = [{name: self._known(child) for name, child in children.items()} for children in self.children]

    def _known(self, child: nn.Module | None) -> Any:
        """What equals the child, and does not keep it: weights that were taken out are not held until the next step."""
        children = self.children
        return child if child is None else weakref.proxy(child, lambda _: children.clear())

    @property
    def changed(self) -> bool:
        return self.children != self.seen
