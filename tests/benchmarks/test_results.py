"""The file that a benchmark writes row by row, and the rows that a process of its own hands it."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import _results as results


def test_a_file_says_what_is_to_come(tmp_path):
    out = tmp_path / "new" / "rows.json"
    results.write(out, {"runs": [1]}, ["the second"])
    assert json.loads(out.read_text()) == {"runs": [1], "incomplete": ["the second"]}
    results.write(out, {"runs": [1, 2]})
    assert json.loads(out.read_text()) == {"runs": [1, 2]} and list(out.parent.iterdir()) == [out]


def test_rows_are_read_out_of_what_else_a_process_prints(capsys):
    """A row that begins in the middle of a line is none: a library's message came before it."""
    rows = [{"status": "ok", "losses": [1.5]}, {"status": "row: none"}]
    print("row by row")
    for row in rows:
        results.print_row(row)
        print("a warning, row: {}")
    assert [*results.printed_rows(capsys.readouterr().out.splitlines(keepends=True))] == rows


def printing(*statuses: str) -> str:
    return "; ".join(f"print({results.ROW + json.dumps({'status': status})!r}, flush=True)" for status in statuses)


@pytest.mark.parametrize(
    ("code", "seconds", "status"),
    [
        (printing("first", "last"), float("inf"), "last"),
        ("raise SystemExit('why')", 60, "error: see "),
        ("print('so far'); raise ValueError('why')", 60, "error: see "),
        ("import time; time.sleep(60)", 1, "left out: no time was left"),
        (printing("begun"), 0.5, "left out: no time was left"),
        (
            printing("first", "incomplete") + "; print('row: {', end='', flush=True); import time; time.sleep(60)",
            2,
            "incomplete",
        ),
        (printing("incomplete") + "; import os; os._exit(3)", 60, "error: see "),
    ],
    ids=["rows", "fails", "tells why", "takes too long", "not begun", "cut", "dies"],
)
def test_a_process_of_its_own_gives_a_row(code, seconds, status, tmp_path, monkeypatch):
    """It always does: also where the process fails, takes longer than it may, or is not begun."""
    monkeypatch.setattr(results, "LEAST", 0.9)
    log = tmp_path / "a.log"
    row = results.row_apart([sys.executable, "-c", code], log, seconds)
    assert row["status"].startswith(status)
    assert not code.startswith("raise") or log.read_text() == "why\n"
    assert row["status"].endswith("ValueError: why") == ("ValueError" in code)
    assert ("spent_s" in row) == (status == "incomplete")


def test_cases_that_have_a_process_each(tmp_path, capsys):
    """All on one saved model; a case that fails is in the file, the next one runs, and the status says so."""
    asked = []

    def run(name, folder, seconds):
        asked.append((name, Path(folder, "model").read_text(), seconds))
        return {"status": "ok", "ms": 3} if name == "b" else {"status": "oom"}

    given = argparse.Namespace(seconds=30.0, logs=tmp_path / "logs", out=tmp_path / "made.json")
    save = lambda folder, device: Path(folder, "model").write_text(device)  # noqa: E731
    cases = {name: {"system": name} for name in "abc"}
    assert results.run_apart(given, cases, save, run, lambda row: f"{row['ms']} ms") == 1
    rows = json.loads(given.out.read_text())["runs"]
    assert [(row["system"], row["order"], row["status"]) for row in rows] == [
        ("a", 0, "oom"),
        ("b", 1, "ok"),
        ("c", 2, "oom"),
    ]
    assert [name for name, _, _ in asked] == [*"abc"] and all(seconds <= 20 for *_, seconds in asked)
    assert capsys.readouterr().out.splitlines() == ["a: oom", "b: 3 ms", "c: oom"] and given.logs.is_dir()
