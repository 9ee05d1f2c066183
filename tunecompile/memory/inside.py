"""What is inside a layer now: adapters come, are merged and go, and `torch.func.functional_call` has other weights there for the length of a call."""

from __future__ import annotations

from typing import Sequence

from torch import Tensor, nn


class Inside:
    """A layer's parameters and buffers. Its modules are walked anew only where one came or went, or a parameter is not known: that takes 100 us of a layer with
    adapters, and what is asked at every call less than a fifth."""

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.walk()

    def walk(self) -> None:
        modules = list(self.layer.modules())
        self.parameters = [held for module in modules if (held := module._parameters)]  #: each by name, as modules keep them
        self.buffered = [module._buffers for module in modules]
        self.parents = [held for module in modules if (held := module._modules)]
        self.children = self._children()

    def _children(self) -> list[nn.Module | None]:
        return [child for held in self.parents for child in held.values()]

    def _ids(self) -> set[int]:
        return {id(parameter) for held in self.parameters for parameter in held.values()}

    def follow(self) -> "Inside":
        """At the beginning of a call."""
        if self._children() != self.children:
            self.walk()
        return self

    def owns(self, weights: Sequence[Tensor]) -> bool:
        """Whether they are parameters that are in place now."""
        wanted = set(map(id, weights))
        if wanted <= self._ids():
            return True
        self.walk()
        return wanted <= self._ids()

    def buffers(self) -> list[Tensor]:
        return [buffer for held in self.buffered if held for buffer in held.values() if buffer is not None]
