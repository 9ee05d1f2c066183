"""CUDA graphs under a budget: what they may take.

Recordings hold their memory for good, beside the memory of steps that are not recorded. `leave_room_for_graphs` in
tunecompile/planner/step_plan.py weighs plans that leave them room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tunecompile.planner.step_plan import AdmittedPlan
from tunecompile.runtime.cuda_graphs.allowance import Allowance
from tunecompile.runtime.cuda_graphs.replay import GraphReplays

MAX_DROPPED = 3  #: times; from then on layers are recorded only where any step has room beside their recordings


@dataclass
class Recordings:
    """The recordings of one model."""

    replays: GraphReplays | None
    device: torch.device
    dropped: int = 0  #: how often they were dropped for a step of another shape, or since the device was full
    steps: int = 0
    again: int = 0  #: steps on as many tokens as the one before

    @property
    def made(self) -> bool:
        """Whether there are any on this device."""
        return self.replays is not None and self.replays.recorder.device == self.device.type

    @property
    def bytes(self) -> int:
        """Bytes that they made the process take from the device."""
        return self.replays.bytes + self.replays.buffers.nbytes if self.replays is not None else 0

    @property
    def saved(self) -> int:
        """Bytes of these that are in tensors between steps: the others are scratch."""
        return self.replays.saved_bytes() + self.replays.buffers.nbytes if self.replays is not None else 0

    def begin(self, tokens: int) -> None:
        """Before the first layer of a step on so many tokens."""
        if self.replays is not None:
            self.steps, self.again = self.steps + 1, self.again + (tokens == self.replays.tokens)
            self.replays.tokens = tokens

    def saving(self, tokens: int) -> float:
        """Milliseconds that they save of the forwards of a step on so many tokens, as far as is known by now.

        0 where most steps are of another size than the one before: layers are hardly ever replayed then, and no plan is
        made slower for that. (DPO of an 8B within 10.7 GiB: 930 ms a step for 780, and 48 s to compile it.)
        """
        return self.replays.saving(tokens) if self.made and 2 * self.again > self.steps else 0.0

    def allow(self, made: AdmittedPlan) -> None:
        """Let recordings take the room that this plan leaves them.

        Beside copies to the host there are none: a replay would write over what is still copied.
        """
        if made.choice.offloads:
            self.forget()
        if self.replays is not None:
            layers, whole, alone = sum(map(len, made.choice.options)), made.recorded, self.dropped < MAX_DROPPED
            room = 0 if made.choice.offloads else made.room + made.spare - made.weights
            self.replays.allowance = Allowance(
                room, made.choice.peak, layers, alone, whole.scratch, whole.saved, whole.beside
            )

    def forget(self) -> bool:
        """Drop them. Returns whether there were any."""
        held = self.bytes > 0
        if held:
            self.replays.forget()
        return held

    def retreat(self) -> bool:
        """The device was full: drop them, since they took more than they should. Returns whether there were any."""
        held = self.forget()
        self.dropped += held
        if self.dropped >= MAX_DROPPED and self.replays is not None and self.replays.allowance is not None:
            self.replays.allowance = replace(self.replays.allowance, alone=False)  # also if the plan stays
        return held

    def make_way(self, needed: int, room: int) -> bool:
        """Drop recordings where a step of another shape needs their memory. Returns whether they were.

        Args:
            needed: bytes of that step.
            room: bytes for its layers, head and loss.
        """
        return self.bytes + needed > room and self.retreat()
