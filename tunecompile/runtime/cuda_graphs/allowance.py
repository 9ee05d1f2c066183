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
    scratch: int = 0  #: bytes that the first recording takes, beside what its layer saves
    saved: int = 0  #: bytes that recordings of all layers save
    beside: int | None = None  #: bytes of the step outside of recordings, if all layers are; None: not known

    def admits(self, taken: int, recorded: int) -> bool:
        """Whether one more layer may be recorded, or the backward of one that is.

        Either all layers will be, and then nothing runs beside recordings but what is not part of a layer; or the rest
        has scratch of its own.

        Args:
            taken: bytes of the recordings.
            recorded: layers that are.
        """
        rest = max(0, self.layers - recorded) if self.alone else self.layers
        taken, beside = max(taken, self.scratch), self.beside or 0
        if self.alone and self.beside is not None and taken + self.saved * rest // self.layers + beside < self.room:
            return True
        return taken + max(self.step * rest // self.layers, beside) < self.room
