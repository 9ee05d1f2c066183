"""CUDA graphs under a budget: what they may take, and what a plan is worth that leaves them room.

What is recorded is held for good, beside what a step needs that is not. A plan that just fits leaves nothing for that; where launches take
longer than what they launch, one that holds less and computes more may be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tunecompile.planner.solver import Assignment, LayerRun, choose
from tunecompile.runtime.cuda_graphs.replay import Allowance, GraphReplays

RECORDED = 1.5  #: times what a step needs is what it needs recorded. (8B on 2x512 tokens: 4.1 GiB for 2.8, forwards' scratch and backwards' apart)
MAX_DROPPED = 3  #: from then on only what leaves room for any step beside it is recorded
SHARES = (
    0.9,
    0.8,
    1 / RECORDED,
)  #: of the room, for a plan beside which there is some for recordings; the last, for all of them


@dataclass
class Recordings:
    """Those of one model."""

    replays: GraphReplays | None
    device: torch.device
    launching: float = 0.0  #: milliseconds in which the host launches the forwards of one step, if kernels wait for it; 0 if that is not known
    short: bool = False  #: whether no plan was known that leaves room for all of them
    dropped: int = 0  #: how often they were in the way of a step of another shape

    @property
    def made(self) -> bool:
        """Whether there are any on this device."""
        return self.replays is not None and self.replays.recorder.device == self.device.type

    @property
    def bytes(self) -> int:
        return self.replays.bytes if self.replays is not None else 0

    def look(self) -> float:
        """What launches take, as far as is known by now."""
        if self.made:
            self.launching = max(self.launching, self.replays.launching())
        return self.launching

    def weigh(
        self, choice: Assignment, stacks: Sequence[LayerRun], room: int, tail: int, computing: float
    ) -> Assignment:
        """Of this choice and smaller ones, the one whose step is shortest. computing: milliseconds of the forwards themselves."""
        self.short = False
        gain = 2 * (self.look() - computing)  # as much in backwards
        if not self.made or RECORDED * choice.peak <= room or not choice.fits or gain <= 0:
            return choice
        staying = [
            replace(stack, options=tuple(o for o in stack.options if not o.offloaded)) for stack in stacks
        ]  # what a graph saves stays its own
        smaller = [found for share in SHARES if (found := choose(staying, int(share * room), tail)).fits]
        self.short = not any(RECORDED * found.peak <= 1.01 * room for found in smaller)
        return min(
            [choice, *smaller],
            key=lambda c: c.ms - gain * (0 if c.offloads else min(1.0, (room / c.peak - 1) / (RECORDED - 1))),
        )

    def allow(self, choice: Assignment, room: int) -> None:
        """So much, beside this choice."""
        if self.replays is not None:
            layers = sum(map(len, choice.options))
            self.replays.allowance = Allowance(
                0 if choice.offloads else room, choice.peak, layers, self.dropped < MAX_DROPPED
            )

    def make_way(self, needed: int, room: int) -> bool:
        """For a step that is not what is recorded, and needs so much. Returns whether anything was dropped."""
        if not self.bytes or self.bytes + needed <= room:
            return False
        self.replays.forget()
        self.dropped += 1
        return True
