"""The file of a benchmark that is being run: it is written after each row, and says what is to come.

Where each run has a process of its own, that one prints its rows, and the benchmark reads them from its output.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

#: of processes that measure: nothing is looked for online, and nothing is sent
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}
ROW = "row: "  #: what a line begins with that is a row
INCOMPLETE = "incomplete"  #: status of a row that its process goes on with
LEAST = 20  #: seconds, below which no process is begun
SHARES = 2  #: of the seconds, divided by the cases, that one process may take


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


def row_apart(command: Sequence[str], log: Path, seconds: float, **process: Any) -> dict[str, Any]:
    """The last row that a process prints; all else that it says is in the log.

    It is ended after so many seconds: then its row is the last one, which may be incomplete, if there is one.

    Args:
        command: of the process.
        log: the file.
        seconds: that it may take.
        process: other arguments of `subprocess.run`, such as `env` and `cwd`.
    """
    late = {"status": "left out: no time was left"}
    if seconds < LEAST:
        return late
    limit, cut = None if seconds == float("inf") else seconds, False
    with open(log, "w", encoding="utf-8") as file:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, check=False, timeout=limit, **process)
            said = done.stdout
        except subprocess.TimeoutExpired as error:
            said, cut = error.stdout or b"", True
        file.write(text := said.decode(errors="replace"))
    if cut:
        rows = [*printed_rows(text[: text.rfind("\n") + 1].splitlines())]  # its last line may be cut, too
        return rows[-1] | {"spent_s": seconds} if rows else late
    rows = [*printed_rows(text.splitlines())]
    failed = not rows or rows[-1]["status"] == INCOMPLETE
    return {"status": f"error: see {log} {last_error(log)}".strip()} if failed else rows[-1]


def system_apart(
    given: argparse.Namespace, script: str, name: str, options: Sequence[str], seconds: float, *more: str
) -> dict[str, Any]:
    """The row of one system, from a process of its own, which runs the script again.

    Args:
        given: the script's options.
        script: its file.
        name: of the system.
        options: names of those that the process is given, too, where they have a value.
        seconds: that it may take.
        more: what else its command has.
    """
    command = [sys.executable, script, "--systems", name, "--out", str(given.out), *more]
    for option in options:
        if (value := getattr(given, option)) is not None:
            command += [f"--{option}", str(value)]
    return row_apart(command, given.logs / f"{Path(script).stem}-{name}.log", seconds)


def last_error(log: Path) -> str:
    """The last line of a log that names an exception, or nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line[:200] for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), "")


def save_packed(given: argparse.Namespace, folder: str, device: str) -> None:
    """Save a shape model of random weights, its linears in 4 bits. given: has its name and number of layers."""
    from tunecompile.cli.compare.shapes import save_shape_model

    save_shape_model(given.model, folder, seed=0, device=device, layers=given.layers, quantise=True)


def run_apart(
    given: argparse.Namespace,
    cases: dict[str, dict[str, Any]],
    save: Callable[[str, str], None],
    run: Callable[[str, str, float], dict[str, Any]],
    tell: Callable[[dict[str, Any]], str],
) -> int:
    """A benchmark whose cases have a process each, on one saved model; the exit status.

    Args:
        given: with `seconds` for all, the folder `logs` and the file `out`.
        cases: by name, what is known of its row before it runs.
        save: saves the model: (folder, device).
        run: the row of a case: (name, folder, seconds that it may take).
        tell: a row that is ok, in a line.
    """
    import torch

    from tunecompile.cli.compare.machine import header

    deadline = time.monotonic() + given.seconds
    given.logs = given.logs or Path(tempfile.mkdtemp(prefix="tunecompile-logs-"))
    given.logs.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {**header(), "runs": []}
    memory, names = Path("/dev/shm"), [*cases]
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        save(folder, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        for order, (name, about) in enumerate(cases.items()):
            seconds = min(deadline - time.monotonic(), SHARES * given.seconds / len(cases))
            row = about | {"order": order} | run(name, folder, seconds)
            result["runs"].append(row)
            write(given.out, result, names[order + 1 :])
            print(f"{name}: {tell(row) if row['status'] == 'ok' else row['status']}", flush=True)
    return 0 if all(row["status"] == "ok" for row in result["runs"]) else 1
