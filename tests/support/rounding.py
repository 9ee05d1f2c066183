"""Which shapes layers are called with, and launches that are waited for where there is no GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tests.support import zoo
from tunecompile.runtime.layers.variant import Variant
from tunecompile.runtime.unpad import decision, flat_batch, sizes

MULTIPLE = 64  #: in place of what kernels of a GPU are made for


def waited_for(monkeypatch, learns: bool = True) -> None:
    """Sizes are rounded up as on a GPU that waits for each launch, to a smaller multiple.

    learns: without any clock.
    """
    if learns:
        monkeypatch.setattr(sizes.SizesSeen, "learn", lambda self, tokens: setattr(self, "waits", 1 << 30))
    for module in (flat_batch, sizes):
        monkeypatch.setattr(module, "multiple_on", lambda device: MULTIPLE)


def kernels_have_windows(monkeypatch) -> None:
    """As a GPU's have, so that whole rows longer than a window run as documents."""
    monkeypatch.setattr(decision, "narrows", lambda window, mask: 0 < window < mask.shape[-1])


def whole(length: int, rows: int = 2) -> dict:
    """A batch without padding."""
    return zoo.batch(seed=length, rows=rows, length=length)


@dataclass
class Shapes:
    """Hidden states of all calls of compiled layers."""

    seen: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    @staticmethod
    def of(monkeypatch) -> Shapes:
        """From now on."""
        made, call = Shapes(), Variant.call

        def watched(self, layer, *args, **kwargs):
            hidden = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            made.seen.append((type(layer).__name__, tuple(hidden.shape)))
            return call(self, layer, *args, **kwargs)

        monkeypatch.setattr(Variant, "call", watched)
        return made

    def of_layers(self, kind: str) -> set[tuple[int, ...]]:
        """The different ones of a class of layers."""
        return {shape for name, shape in self.seen if name == kind}

    def calls(self, shape: tuple[int, ...]) -> int:
        """How often a layer was called with this one."""
        return sum(each == shape for _, each in self.seen)

    def last(self, steps: int) -> list[tuple[int, ...]]:
        """The last shapes, one after another."""
        different = [each for at, each in enumerate(self.seen) if not at or self.seen[at - 1] != each]
        return [shape for _, shape in different[-steps:]]
