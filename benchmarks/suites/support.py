"""The table of what is supported, from the tests of its cells (`tests/models/test_support.py`): on a GPU through Inductor, else op by op on the CPU.

python benchmarks/suites/support.py --out benchmarks/results/support.json
python benchmarks/suites/support.py --only "adapter" --processes 8 --out /tmp/adapters.json    # all others stay in the file as they were
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks.suites.suites import outcome
from tests.support.matrix.cells import cells
from tunecompile.cli.compare.machine import header

ROOT = Path(__file__).parents[2]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help='cells whose section or name this says, as pytest\'s -k ("trainer or loop")'
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 2),
        help="at a time (more than one needs pytest-xdist)",
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def tested(only: str, processes: int, device: str) -> list[dict[str, Any]]:
    """A row a cell."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cells.xml")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-vv",
                "-p",
                "no:cacheprovider",
                "tests/models/test_support.py",
                f"--junitxml={path}",
                "-m",
                "slow or not slow",
                "-rfE",
                *(["-k", only] if only else []),
                *(["-n", str(processes), "--dist", "worksteal"] if processes > 1 else []),
            ],
            check=False,
            cwd=ROOT,
            env={"CUDA_VISIBLE_DEVICES": "0", **os.environ, "SUPPORT_DEVICE": device},
        )
        return [row(case) for case in ElementTree.parse(path).iter("testcase")]


def merged(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the table's order (processes finish in any), with what an earlier run found of cells that did not run now."""
    found = {f"{row['section']}: {row['name']}": row for row in (*before, *rows)}
    return [found[name] for cell in cells() if (name := str(cell)) in found]


def row(case: ElementTree.Element) -> dict[str, Any]:
    """Of pytest's report of one cell."""
    section, _, name = case.get("name", "").partition("[")[2].removesuffix("]").partition(": ")
    facts = {
        entry.get("name"): re.sub(r"/\S*/", "", entry.get("value")) for entry in case.iter("property")
    }  # places without the folders of this machine
    status, reason = outcome(case)
    return {
        "section": section,
        "name": name,
        "status": "ok" if status == "passed" else status,
        "reason": reason[:300],
        "found": int(facts.get("found", 0)),
        "rewritten": int(facts.get("rewritten", 0)),
        "refused": facts.get("refused", ""),
        "notes": facts.get("notes", ""),
    }


def main() -> int:
    given = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = tested(given.only, given.processes, device)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    made = {**header(), "device": device}
    before = json.loads(given.out.read_text()) if given.only and given.out.exists() else made
    if before["device"] != device:  # the table says where most of it ran, and of these rows that they did elsewhere
        made, rows = before, [{**each, "device": device} for each in rows]
    result = {**made, "runs": merged(rows, before.get("runs", []))}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    for found in rows:
        print(
            f"{found['status']:8s}{found['section']}: {found['name']}  {found['rewritten']} of {found['found']} {found['reason']}"
        )
    return 0 if rows and all(found["status"] != "failed" for found in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
