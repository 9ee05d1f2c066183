"""The golden table and a quick choice of tests under the oldest versions that we support, the tested ones and the newest, as one table.

    make test-versions    # makes an environment for each set of versions first

A set is a constraints file at the top of the repository; its environment lies beside it, and that of the tested one runs this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETS = {
    "oldest": ("constraints-oldest.txt", ".venv-oldest/bin/python"),
    "tested": ("constraints.txt", sys.executable),
    "newest": ("constraints-newest.txt", ".venv-newest/bin/python"),
}
SHOWN = ("torch", "transformers", "peft", "bitsandbytes", "trl")  #: of each set, in the table
QUICK = (
    "runtime/test_attach.py",
    "runtime/test_fallbacks.py",
    "models/test_families.py",
    "models/test_adapters.py",
    "models/test_trainers.py",
    "passes/test_nf4.py",
    "_torch/test_known_bugs.py",
    "_torch/test_private_names.py",
)


def pins(file: str) -> dict[str, str]:
    """Package -> version.

    Raises:
        ValueError: a line is no `package==version`.
    """
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    return dict(_pin(line, file) for line in lines if line)


def _pin(line: str, file: str) -> tuple[str, str]:
    package, equal, version = line.partition("==")
    if not (package and equal and version):
        raise ValueError(f"{file}: {line!r} is not of the form package==version")
    return package, version


@dataclass(frozen=True)
class Outcome:
    """Of one set. `differs` and `failed` are (test, first line of what it says)."""

    families: int
    passed: int
    skipped: int
    differs: list[tuple[str, str]]
    failed: list[tuple[str, str]]
    seconds: float = 0.0


def read(junit: list[str], seconds: float = 0.0) -> Outcome:
    """The outcome from what pytest wrote with `--junitxml`, a text for each run. A run that wrote nothing has failed as a whole."""
    families, passed, skipped, differs, failed = 0, 0, 0, [], []
    for text in junit:
        cases = list(ElementTree.fromstring(text).iter("testcase")) if text else []
        failed += [] if cases else [("pytest", "it ran no test")]
        for case in cases:
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            golden = name.startswith("test_golden::test_a_familys_row")
            wrong = next((part for part in case if part.tag in ("failure", "error")), None)
            if wrong is not None:
                (differs if golden else failed).append((name, (wrong.get("message") or "").strip().partition("\n")[0]))
            elif any(part.tag == "skipped" for part in case):
                skipped += 1
            else:
                families, passed = families + golden, passed + (not golden)
    return Outcome(families, passed, skipped, differs, failed, seconds)


def run(python: str) -> Outcome:
    """All rows of the golden table, those that are slow too, and the quick tests."""
    begin, texts = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for number, arguments in enumerate(
            (
                ["-m", "not gpu", "tests/models/test_golden.py"],
                ["-m", "not gpu and not slow", *(f"tests/{file}" for file in QUICK)],
            )
        ):
            report = Path(folder, f"{number}.xml")
            subprocess.run(
                [
                    ROOT / python,
                    "-m",
                    "pytest",
                    "-p",
                    "no:cacheprovider",
                    "-n",
                    "auto",
                    "--maxprocesses",
                    "4",
                    "--dist",
                    "worksteal",
                    f"--junitxml={report}",
                    *arguments,
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=False,
            )
            texts.append(report.read_text(encoding="utf-8") if report.exists() else "")
    return read(texts, time.monotonic() - begin)


def show(outcomes: dict[str, Outcome]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("versions", *SHOWN, "families as in the golden table", "other tests", "minutes")
    for name, outcome in outcomes.items():
        found = pins(SETS[name][0])
        good = f"{outcome.families} of {outcome.families + len(outcome.differs)}"
        tests = f"{outcome.passed} of {outcome.passed + len(outcome.failed)}, {outcome.skipped} skipped"
        table.add_row(
            name,
            *(found[package] for package in SHOWN),
            *(
                f"[{'red' if bad else 'green'}]{text}"
                for bad, text in ((outcome.differs, good), (outcome.failed, tests))
            ),
            f"{outcome.seconds / 60:.1f}",
        )
    console = Console()
    console.print(table)
    for name, outcome in outcomes.items():
        for what, wrong in (("differs from the golden table", outcome.differs), ("failed", outcome.failed)):
            for test, said in wrong:
                console.print(f"{name} {what}: {escape(test)}: {escape(said)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    done = {name: run(SETS[name][1]) for name in sys.argv[1:] or SETS}
    show(done)
    sys.exit(any(outcome.differs or outcome.failed for outcome in done.values()))
