"""The bytes of a step whose layers are all recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunecompile.planner.solver import Plan, PlanOption

RECORDED = 1.1  #: times what recordings need is what their pools take: blocks that are too small are left unused
#: times the bytes that a layer hands on: the buffers of what a recording reads (of a forward its input, of a backward
#: that and a gradient), and the gradient that it gives
BUFFERS = 4


@dataclass(frozen=True)
class RecordedStep:
    """The bytes of a step whose layers are all recorded.

    Recordings hold their memory for good: what layers save, and scratch. Forwards and backwards of one compiled layer
    have their scratch in the same memory, so each plan needs it once.
    """

    scratch: int
    saved: int  #: of all layers
    beside: int  #: the most that is outside of recordings at once: what layers hand on, head and loss, gradients

    @property
    def bytes(self) -> int:
        """All together."""
        return int(RECORDED * (self.scratch + self.saved)) + self.beside

    def share(self, room: int, unrecorded: int) -> float:
        """The share of the layers that are recorded in this room.

        Args:
            room: bytes.
            unrecorded: bytes of the same step without recordings.
        """
        if self.bytes <= room:
            return 1.0
        both = unrecorded + self.scratch  # layers that are not recorded have scratch of their own
        return max(0.0, (room - both) / (self.bytes - both)) if room > both else 0.0


def recorded_step(stacks: Sequence[Sequence[PlanOption]], tail: int) -> RecordedStep:
    """What a step takes with all layers recorded.

    Args:
        stacks: an option for every layer, in the order in which layers run. None of them goes to the host.
        tail: bytes that head and loss need.
    """
    order = [option for stack in stacks for option in stack]
    kinds: dict[tuple[int, Plan], int] = {}  # each has compiled graphs of its own, and so a pool
    for option in order:
        at, needed = (option.kind, option.plan), max(option.forward + option.passed, option.backward)
        kinds[at] = max(kinds.get(at, 0), needed)
    scratch = sum(kinds.values())
    gradients, handed, highest = sum(option.gradients for option in order), 0, 0
    for option in order:
        handed += option.passed
        highest = max(highest, handed + gradients)
        gradients -= option.gradients
    buffers = BUFFERS * max((option.passed for option in order), default=0)
    saved = sum(max(0, option.held - option.passed) for option in order)
    return RecordedStep(scratch, saved, max(highest, handed + tail) + buffers)
