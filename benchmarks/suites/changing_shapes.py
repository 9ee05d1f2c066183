"""Families under LoRA, NF4, DoRA and with all weights, in five batches of changing shapes: gradients against fp32, compilations, seconds.

    python benchmarks/suites/changing_shapes.py --out benchmarks/results/shapes.json
    python benchmarks/suites/changing_shapes.py --modes lora,nf4 --seconds 260 --out /tmp/half.json
    python benchmarks/suites/changing_shapes.py --without /tmp/half.json --out /tmp/rest.json

The cells of `tests/models/test_gpu_families.py`, in several processes. The file is written after each cell; what an earlier run
found of other cells stays in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from tests.support.matrix.compiled import CELLS, MODES, EagerFails, run
from tunecompile.cli.compare.machine import header

Cell = tuple[str, str]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--modes", type=lambda text: text.split(","), default=list(MODES), help="all, if not given; in this order"
    )
    parser.add_argument("--families", type=lambda text: re.split(",(?! )", text), help="all, if not given")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="results whose cells are left out")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="at a time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further result is awaited")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def chosen(modes: list[str], families: list[str] | None, without: list[Path]) -> list[Cell]:
    """The cells to run. families: None for all. without: results whose cells are left out."""
    done = {(row["family"], row["mode"]) for path in without for row in json.loads(path.read_text())["runs"]}
    asked = (
        cell for cell in CELLS if cell[1] in modes and cell not in done and (families is None or cell[0] in families)
    )
    return sorted(asked, key=lambda cell: modes.index(cell[1]))


def work(cells: multiprocessing.Queue, rows: multiprocessing.Queue, device: str) -> None:
    """Run cells, one after another, until there are none."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with contextlib.suppress(queue.Empty):
        while True:
            cell = cells.get(timeout=1)
            rows.put((os.getpid(), cell, None))
            rows.put((os.getpid(), cell, row_of(cell, device)))


def row_of(cell: Cell, device: str) -> dict[str, Any]:
    """What a cell's run gave, or how it failed."""
    begun, (name, mode) = time.perf_counter(), cell
    try:
        found = run(name, mode, device)
        row = {"status": "failed" if found["wrong"] else "ok", "reason": "; ".join(found["wrong"]), **found}
    except EagerFails as error:
        row = {"status": "skipped", "reason": str(error)[:300]}
    except Exception as error:  # the others go on
        row = {
            "status": "failed",
            "reason": f"{type(error).__name__}: {error}"[:600],
            "where": traceback.format_exc()[-1500:],
        }
    return {"family": name, "mode": mode, **row, "total_s": round(time.perf_counter() - begun, 1)}


def collect(cells: list[Cell], processes: int, seconds: float, device: str):
    """Rows as they come. A process that dies has failed its cell, and another takes its place."""
    context, end = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    todo, rows, running, left = context.Queue(), context.Queue(), {}, len(cells)
    for cell in cells:
        todo.put(cell)

    def start() -> None:
        worker = context.Process(target=work, args=(todo, rows, device), daemon=True)
        worker.start()
        running[worker.pid] = [worker, None]

    for _ in range(min(processes, len(cells))):
        start()
    while left and time.monotonic() < end:
        try:
            pid, cell, row = rows.get(timeout=1)
        except queue.Empty:
            for pid, (worker, cell) in list(running.items()):
                if worker.is_alive() or worker.exitcode == 0:
                    continue
                del running[pid]
                start()
                if cell is not None:
                    left -= 1
                    reason = f"its process ended with {worker.exitcode}"
                    yield cell, {"family": cell[0], "mode": cell[1], "status": "failed", "reason": reason}
            continue
        if pid in running:
            running[pid][1] = cell if row is None else None
        if row is not None:
            left -= 1
            yield cell, row
    for worker, _ in running.values():
        worker.kill()


def main() -> int:
    given = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells = chosen(given.modes, given.families, given.without)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(given.out.read_text())["runs"] if given.out.exists() else []
    found = {(row["family"], row["mode"]): row for row in before}
    about, new = {**header(), "device": device}, []
    for cell, row in collect(cells, given.processes, given.seconds, device):
        found[cell] = row
        new.append(row)
        result = {**about, "runs": [found[cell] for cell in CELLS if cell in found]}
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        print(said(row), flush=True)
    failed = sum(row["status"] == "failed" for row in new)
    print(f"{len(new)} of {len(cells)} cells, {failed} failed")
    return 1 if failed or len(new) < len(cells) else 0


def said(row: dict[str, Any]) -> str:
    """A row's line."""
    start = f"{row['status']:8s}{row['family']}, {row['mode']}: {row.get('total_s', 0)} s"
    if "error" not in row:
        return f"{start}: {row['reason'][:400]}"
    return (
        f"{start}, error {row['error']:.4f} (eager {row['eager_error']:.4f}), worst {row['worst']:.2f}, "
        f"compiled {row['compiles']}, pieces {row['pieces']}, steps {row['seconds']} {row['reason'][:300]}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
