"""CUDA graphs under a budget: what they may take.

Recordings hold their memory for good, beside the memory of steps that are not recorded. `leave_room_for_graphs` in
tunecompile/planner/step_plan.py weighs plans that leave them room.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tunecompile.planner.solver import Assignment
from tunecompile.runtime.cuda_graphs.allowance import Allowance
from tunecompile.runtime.cuda_graphs.replay import GraphReplays

MAX_DROPPED = 3  #: times; from then on layers are recorded only where any step has room beside their recordings


@dataclass
class Recordings:
    """The recordings of one model."""

    replays: GraphReplays | None
    device: torch.device
    #: milliseconds in which the host launches the forwards of one step, if kernels wait for it; 0 as long as that is
    #: not known
    launching: float = 0.0
    dropped: int = 0  #: how often they were dropped for a step of another shape

    @property
    def made(self) -> bool:
        """Whether there are any on this device."""
        return self.replays is not None and self.replays.recorder.device == self.device.type

    @property
    def bytes(self) -> int:
        return self.replays.bytes if self.replays is not None else 0

    def look(self) -> float:
        """Milliseconds that launches take, as far as is known by now."""
        if self.made:
            self.launching = max(self.launching, self.replays.launching())
        return self.launching

    def allow(self, choice: Assignment, room: int) -> None:
        """Let recordings take this room, in bytes, beside this choice."""
        if self.replays is not None:
            layers = sum(map(len, choice.options))
            self.replays.allowance = Allowance(
                0 if choice.offloads else room, choice.peak, layers, self.dropped < MAX_DROPPED
            )

    def make_way(self, needed: int, room: int) -> bool:
        """Drop recordings where a step of another shape needs their memory. Returns whether they were.

        Args:
            needed: bytes of that step.
            room: bytes for its layers, head and loss.
        """
        if not self.bytes or self.bytes + needed <= room:
            return False
        self.replays.forget()
        self.dropped += 1
        return True
