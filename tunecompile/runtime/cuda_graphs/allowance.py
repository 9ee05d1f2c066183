"""The memory that recordings may take beside the layers of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allowance:
    """The bytes that recordings may take beside the layers of one step."""

    room: int  #: bytes for layers, head and loss
    step: int  #: bytes that the step needs unrecorded
    layers: int  #: of the step
    alone: bool  #: whether no other step runs, so that a recorded layer needs its share of the step no more

    def admits(self, taken: int, recorded: int) -> bool:
        """Whether one more layer may be recorded.

        Args:
            taken: bytes of the recordings.
            recorded: layers that are.
        """
        rest = max(0, self.layers - recorded) if self.alone else self.layers
        return taken + self.step * rest // self.layers < self.room
