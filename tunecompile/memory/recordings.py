"""CUDA graphs under a budget: what they may take, and what a plan is worth that leaves them room.

What is recorded is held for good, beside what a step needs that is not. A plan that just fits leaves nothing for that; where launches take
longer than what they launch, one that holds less and computes more may be faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

import torch

from tunecompile.graphs import Replays
from tunecompile.memory.planner import Choice, Stack, choose

SHARES = (0.8, 0.65, 0.5)  #: of the room, for a plan beside which there is some for recordings; half of it, for all of them


@dataclass
class Recordings:
    """Those of one model."""

    replays: Replays | None
    device: torch.device
    launching: float = 0.0  #: milliseconds in which the host launches the forwards of one step, if kernels wait for it; 0 if that is not known
    short: bool = False  #: whether no plan was known that leaves room for all of them

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

    def weigh(self, choice: Choice, stacks: Sequence[Stack], room: int, tail: int, computing: float) -> Choice:
        """Of this choice and smaller ones, the one whose step is shortest. computing: milliseconds of the forwards themselves."""
        self.short = False
        gain = 2 * (self.look() - computing)  # as much in backwards
        if not self.made or 2 * choice.peak <= room or not choice.fits or gain <= 0:
            return choice
        staying = [replace(stack, options=tuple(o for o in stack.options if not o.offloaded)) for stack in stacks]  # what a graph saves stays its own
        smaller = [found for share in SHARES if (found := choose(staying, int(share * room), tail)).fits]
        self.short = not any(2 * found.peak <= room for found in smaller)
        return min([choice, *smaller], key=lambda c: c.ms - gain * (0 if c.offloads else min(1.0, room / c.peak - 1)))

    def allow(self, choice: Choice, room: int, shape_changed: bool) -> bool:
        """Beside this choice; what no longer fits is dropped. Returns whether there was such. (Recordings of another shape are in this one's way.)"""
        if self.replays is None:
            return False
        self.replays.most = 0 if choice.offloads else max(0, room - choice.peak)
        full = self.replays.bytes + shape_changed * choice.peak > self.replays.most and self.replays.bytes > 0
        if full:
            self.replays.forget()
        return full
