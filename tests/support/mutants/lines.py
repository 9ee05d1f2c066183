"""Pytest plugin: which lines of our packages each test runs, how long it takes, and whether it passes.

Each process writes `PREFIX.PID.json`; the environment's LINES names the prefix.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EVERY = 10.0  #: seconds after which a process writes again
TOOL = 1  #: the number that sys.monitoring reserves for coverage


@cache
def inside(filename: str) -> str | None:
    """A file of ours from the root of the repository; None for any other."""
    if "tunecompile" not in filename and "passes" not in filename:
        return None
    path = os.path.relpath(os.path.realpath(filename), ROOT)
    return path if path.startswith(("tunecompile/", "passes/")) else None


class Lines:
    """Collects lines between `begin` and `end`. From Python 3.12 on each place costs one call a test."""

    def __init__(self):
        self.seen: dict[str, set[int]] = defaultdict(set)
        self.monitoring = getattr(sys, "monitoring", None)
        if self.monitoring is not None:
            self.monitoring.use_tool_id(TOOL, "lines")
            self.monitoring.register_callback(TOOL, self.monitoring.events.LINE, self._line)

    def begin(self) -> None:
        self.seen = defaultdict(set)
        if self.monitoring is None:
            threading.settrace(self._trace)  # threads that begin from here on
            sys.settrace(self._trace)
        else:
            self.monitoring.restart_events()
            self.monitoring.set_events(TOOL, self.monitoring.events.LINE)

    def end(self) -> dict[str, set[int]]:
        if self.monitoring is None:
            threading.settrace(None)
            sys.settrace(None)
        else:
            self.monitoring.set_events(TOOL, 0)
        return self.seen

    def _line(self, code, line):
        if (file := inside(code.co_filename)) is not None:
            self.seen[file].add(line)
        return self.monitoring.DISABLE

    def _trace(self, frame, event, _):
        if (file := inside(frame.f_code.co_filename)) is None:
            return None
        lines = self.seen[file]

        def local(frame, event, _):
            lines.add(frame.f_lineno)
            return local

        lines.add(frame.f_lineno)
        return local


class Plugin:
    def __init__(self, prefix: str):
        self.prefix, self.lines, self.tests, self.written = prefix, Lines(), {}, time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self.lines.begin()
        try:
            return (yield)
        finally:
            seen = self.lines.end()
            self.tests[item.nodeid] = {"lines": {file: sorted(lines) for file, lines in seen.items()}}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.nodeid in self.tests:
            self.tests[report.nodeid] |= {"passed": report.outcome == "passed", "seconds": report.duration}
            if time.monotonic() - self.written > EVERY:  # what there is, if the run is cut off
                self._write()

    def pytest_sessionfinish(self, session):
        if self.tests:
            self._write()

    def _write(self) -> None:
        path = Path(f"{self.prefix}.{os.getpid()}.json")
        path.with_suffix(".part").write_text(json.dumps(self.tests))
        path.with_suffix(".part").rename(path)
        self.written = time.monotonic()


def pytest_configure(config):
    if prefix := os.environ.get("LINES"):
        config.pluginmanager.register(Plugin(prefix), "lines-of-tests")
