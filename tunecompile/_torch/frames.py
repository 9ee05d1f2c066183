"""Python's own frames: which functions are under way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def under_way() -> Iterator[FrameType]:
    """Frames, from the one that iterates outwards."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
