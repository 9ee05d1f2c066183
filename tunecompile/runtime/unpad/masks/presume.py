"""Batches whose rows are whole come one after another, so that the next one is presumed to be one.

A decision needs numbers that the device has, and the wait for them leaves it idle until the host has launched the next
layer. Of whole rows all that is needed is their shape. So where the last batches had whole rows, the layers are run as
if this one had, and the device reads the mask behind the first of them, for which it would have to wait otherwise; what
it found is there when the call of the model ends, and a batch that is another one is run again, with a wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from tunecompile._torch.distributed import several
from tunecompile.runtime.unpad.decision import UnpadDecision
from tunecompile.runtime.unpad.documents import PendingReading, begin_reading
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.masks.pairs import version
from tunecompile.runtime.unpad.refusals import OwnerWatch

AFTER = 3  #: batches of whole rows, one after another
#: layers that are launched before the device reads: behind the first one alone it would wait for the second
AHEAD = 2
SURPRISES = 2  #: batches that were run again, after which nothing is presumed any more


@dataclass
class Presumed:
    """One mask that was not waited for."""

    mask: Tensor | None  #: None once it is being read
    version: int  #: how often it had been written to
    flat: FlatBatch
    pending: PendingReading | None = None

    def read(self) -> None:
        """Let the device read it, behind what was launched so far."""
        if self.mask is not None and version(self.mask) == self.version:
            self.pending = begin_reading(self.mask, (self.flat.window,), None)
        self.mask = None

    def holds(self) -> bool:
        """Whether the mask is what it was taken for; not if it was written to before it was read."""
        self.read()
        found = None if self.pending is None else self.pending.wait().documents
        return found is not None and found.full and found.window == self.flat.window


@dataclass
class Presumptions:
    """What the layers that decide for a mask were given last."""

    seen: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = field(default_factory=weakref.WeakKeyDictionary)
    surprises: int = 0

    def learn(self, layer: nn.Module, decision: UnpadDecision) -> None:
        """A mask was read."""
        flat = decision.flat
        if flat is None or not flat.whole:
            self.seen.pop(layer, None)
            return
        window, times = self.seen.get(layer, (flat.window, 0))
        self.seen[layer] = flat.window, times + 1 if window == flat.window else 1

    def presume(
        self, layer: nn.Module, mask: Tensor, watch: OwnerWatch, before: Sequence[Presumed]
    ) -> tuple[UnpadDecision, Presumed] | None:
        """The decision for a mask that nobody has read, and what has to be found in it; None where one has to wait.

        One of several processes always waits: others would wait for collectives of layers that it runs again.

        Args:
            before: what was presumed of other masks in this call.
        """
        window, times = self.seen.get(layer, (0, 0))
        if times < AFTER or self.surprises >= SURPRISES or several():
            return None
        if not before and watch.reason() is not None:  # a look at all modules, and so the last question
            return None
        shape = len(mask), mask.shape[-1]
        rows = next((each.flat for each in before if each.flat.shape == shape), None)
        flat = FlatBatch.of_whole_rows(*shape, window, mask.device) if rows is None else replace(rows, window=window)
        return UnpadDecision(flat), Presumed(mask, version(mask), flat)

    def hold(self, presumed: Sequence[Presumed]) -> bool:
        """Whether all masks of a call are what they were taken for."""
        if all([each.holds() for each in presumed]):
            return True
        self.surprises += 1
        self.seen.clear()
        return False
