"""What a worker has so far: its file is written after each timed run, and it tells where its seconds went."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Progress:
    """The file of a worker's result while the worker runs, and the seconds that each part of its work took."""

    path: Path | None = None  #: None: nothing is written
    spent: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count the seconds of the block as those of a part of the work."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.spent[part] = self.spent.get(part, 0.0) + time.perf_counter() - begun

    def write(self, result: dict) -> None:
        """Write the whole result. A process that is killed meanwhile leaves the file as it was."""
        if self.path is None:
            return
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(result | {"spent_s": self.spent}))
        scratch.replace(self.path)

    def keep(self, runs: list[dict]) -> None:
        """Write the runs so far, and tell the parent of them."""
        from tunecompile.cli.compare.meters import say

        if self.path is not None:
            self.write({"runs": runs})
            say("kept")
