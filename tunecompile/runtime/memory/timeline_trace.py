"""Bytes allocated as each layer's forward and backward begin, sampled in a few steps of each plan.

A query of torch's allocator costs the host some 0.1 ms, since it makes a dictionary of all its counts. That is too much
for every layer of every step, and little for three steps of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from tunecompile.planner.device_memory import Gauge
from tunecompile.runtime.watch.module_watch import hook_node

#: steps of a plan that are sampled, the last one kept: the first compiles, the second is the first with the optimizer's
#: moments
STEPS = 3
Kind = Literal["forward", "tail", "backward"]


@dataclass(frozen=True)
class Sample:
    """Bytes in tensors when one part of the step began."""

    kind: Kind
    place: int | None  #: of the layer among all, in running order; None for head and loss
    allocated: int  #: bytes


@dataclass
class MemoryTrace:
    """The samples of the last step that was sampled."""

    gauge: Gauge
    step: int = 0  #: that was sampled, counted from 1
    tokens: int = 0  #: of that step's batch
    samples: list[Sample] = field(default_factory=list)
    plan: Any = None  #: that step's
    left: int = 0  #: steps of the plan that will be sampled
    sampling: bool = False

    def begin(self, step: int, plan: Any, tokens: int) -> None:
        """Start a step, at its first layer. Bigger batches than before are sampled, too.

        Args:
            step: its number, from 1.
            plan: all layers' options; None in the step that makes them.
            tokens: of the batch.
        """
        if plan is None or plan != self.plan:
            self.plan, self.left = plan, STEPS
        self.sampling = self.left > 0 or tokens > self.tokens
        if self.sampling:  # a new list: a backward of the step before may still write to the old one
            self.left, self.step, self.tokens, self.samples = self.left - 1, step, tokens, []

    def note(self, kind: Kind, place: int | None = None) -> None:
        if self.sampling:
            self.samples.append(Sample(kind, place, self.gauge.allocated()))

    def follow(self, output: Any, place: int) -> None:
        """Sample the layer's backward, by a hook before the node that made its output."""
        if not self.sampling:
            return
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and first.grad_fn is not None:
            hook_node(first.grad_fn, partial(_sample, self.samples, self.gauge, place))


def _sample(samples: list[Sample], gauge: Gauge, place: int, _gradients: Any) -> None:
    samples.append(Sample("backward", place, gauge.allocated()))
