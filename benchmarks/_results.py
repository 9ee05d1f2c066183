"""The file of a benchmark that is being run: it is written after each row, and says what is to come.

Where each run has a process of its own, that one prints its rows, and the benchmark reads them from its output.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROW = "row: "  #: what a line begins with that is a row
LEAST = 20  #: seconds, below which no process is begun


def write(path: Path, result: dict[str, Any], to_come: Sequence[str] = ()) -> None:
    """Write what was measured; report.py leaves the file out while something is to come.

    A process that is ended meanwhile leaves the file as it was before.
    """
    part = result | ({"incomplete": list(to_come)} if to_come else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(part, indent=1, default=str) + "\n")
    scratch.replace(path)


def print_row(row: dict[str, Any]) -> None:
    """Hand a row to the process that reads this one's output."""
    print(ROW + json.dumps(row), flush=True)


def printed_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The rows of a process, out of all that it prints."""
    return (json.loads(line.removeprefix(ROW)) for line in lines if line.startswith(ROW))


def row_apart(command: Sequence[str], log: Path, seconds: float) -> dict[str, Any]:
    """The last row that a process prints; all else that it says is in the log. It is ended after so many seconds."""
    late = {"status": "left out: no time was left"}
    if seconds < LEAST:
        return late
    limit = None if seconds == float("inf") else seconds
    with open(log, "w", encoding="utf-8") as file:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            return late
        file.write(done.stdout)
    rows = [*printed_rows(done.stdout.splitlines())]
    return rows[-1] if rows else {"status": f"error: see {log}"}
