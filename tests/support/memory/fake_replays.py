"""Recordings whose bytes a test gives."""

from __future__ import annotations

import types
from typing import Any


class FakeReplays(types.SimpleNamespace):
    """Stands in for `GraphReplays` on a CPU: it holds nothing and saves no time, but for what a test says."""

    def __init__(self, **given: Any):
        plain = {
            "recorder": types.SimpleNamespace(device="cpu"),
            "bytes": 0,
            "buffers": types.SimpleNamespace(nbytes=0),
            "tokens": 0,
            "allowance": None,
            "saved_bytes": lambda: 0,
            "saving": lambda tokens: 0.0,
        }
        super().__init__(**{**plain, **given})

    def forget(self) -> None:
        """As the real one, all at once."""
        self.bytes = self.buffers.nbytes = 0
