"""What a worker tells its parent: events, and in a file what it has so far and where its seconds went."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tunecompile.cli.compare import ranks


def say(event: str, **fields) -> None:
    """Send an event, one line on stdout, to the parent process. Other output on stdout is only logged."""
    if ranks.rank() == 0:
        print(f"@{event} {json.dumps(fields)}", flush=True)


def wait_to_go() -> None:
    """Wait until the parent process writes a line. Other ranks go on, as they wait for the first one."""
    if ranks.rank() == 0:
        say("turn")
        if not sys.stdin.readline():  # the pipe is closed
            sys.exit("the parent process has ended")


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
        if self.path is not None:
            self.write({"runs": runs})
            say("kept")
