"""Where the time of the tests goes: `pytest --durations-to FILE` writes it, `python -m tests.support.durations FILE` sums it up."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

PHASES = ("setup", "call", "teardown")
TRACES: list[float] = []  #: seconds of each trace of this process, with its backend


def note_traces() -> None:
    """Dynamo's own times are gone with each `torch._dynamo.reset`."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None or not (trace := getattr(frames, "_compile", None)) or trace.__name__ == "timed":
        return

    def timed(*args, **kwargs):
        began = time.perf_counter()
        try:
            return trace(*args, **kwargs)
        finally:
            TRACES.append(time.perf_counter() - began)

    frames._compile = timed


def processor() -> float:
    """Seconds of this process's, and of those it started and that ended."""
    return sum(os.times()[:4])


class Durations:
    """Each test's seconds by phase, of the processor, and of its traces; each worker's collection."""

    def __init__(self, path: Path):
        self.path, self.began = path, time.time()
        self.tests: dict[str, dict] = defaultdict(dict)
        self.workers: dict[str, dict] = defaultdict(dict)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session):
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            took = round(time.perf_counter() - began, 2)
            getattr(session.config, "workeroutput", self.workers["main"])["collection"] = took

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        note_traces()
        self.before = processor(), len(TRACES)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item):
        cpu, known = self.before
        made = TRACES[known:]
        item.user_properties.append(("used", (processor() - cpu, len(made), sum(made))))

    def pytest_runtest_logreport(self, report):
        test = self.tests[report.nodeid]
        test[report.when] = round(report.duration, 3)
        test["worker"] = getattr(report, "worker_id", "main")
        if used := dict(report.user_properties).get("used"):
            test["cpu"], test["traces"], test["tracing"] = round(used[0], 3), used[1], round(used[2], 3)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.workers[node.gateway.id] |= {"collection": getattr(node, "workeroutput", {}).get("collection")}

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = {"wall": round(time.time() - self.began, 1), "workers": self.workers, "tests": self.tests}
        self.path.write_text(json.dumps(written, indent=0, sort_keys=True), "utf-8")


def total(test: dict) -> float:
    return sum(test.get(phase, 0.0) for phase in PHASES)


def sums(tests: dict[str, dict], key) -> list[str]:
    """Rows of a table, the longest first: seconds, tests, traces and their seconds of the tests of one `key`."""
    rows: dict[str, list] = defaultdict(lambda: [0.0, 0.0, 0, 0, 0.0])
    for name, test in tests.items():
        row = rows[key(name)]
        for place, value in enumerate(
            (total(test), test.get("cpu", 0.0), 1, test.get("traces", 0), test.get("tracing", 0.0))
        ):
            row[place] += value
    ordered = sorted(rows.items(), key=lambda row: -row[1][0])
    return [f"{s:8.1f} {cpu:8.1f} {n:6} {t:6} {tracing:8.1f}  {name}" for name, (s, cpu, n, t, tracing) in ordered]


def summary(path: Path, most: int = 40) -> str:
    """The workers, then sums by folder and by file, and the slowest functions and tests."""
    written = json.loads(path.read_text("utf-8"))
    tests, lines = written["tests"], [f"wall {written['wall']:.0f} s"]
    for name, worker in sorted(written["workers"].items()):
        mine = [test for test in tests.values() if test["worker"] == name]
        phases = ", ".join(f"{phase} {sum(test.get(phase, 0.0) for test in mine):.0f}" for phase in PHASES)
        lines.append(f"{name}: {phases}, collection {worker.get('collection') or 0:.0f} s")
    for title, key in {
        "folder": lambda name: name.partition("::")[0].rpartition("/")[0],
        "file": lambda name: name.partition("::")[0],
        "function": lambda name: name.partition("[")[0],
        "test": str,
    }.items():
        lines += ["", f" seconds      cpu  tests traces  tracing  {title}", *sums(tests, key)[:most]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(Path(sys.argv[1]), *map(int, sys.argv[2:])))
