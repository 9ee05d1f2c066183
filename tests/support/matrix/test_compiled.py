"""The matrix of families in changing shapes, op by op on a CPU: one cell of each outcome, and the table."""

import json
import sys

import pytest

from benchmarks import report
from benchmarks.suites import changing_shapes as shapes
from tests.support.matrix import compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_eager_does_not_train_is_skipped_and_what_fails_does_not_end_the_run(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    out = tmp_path / "shapes.json"
    batches = compiled.FAMILIES["opt"].batches
    monkeypatch.setitem(compiled.FAMILIES, "untrainable", compiled.Family(lambda: 1 / 0, batches))
    monkeypatch.setitem(compiled.FAMILIES, "failing", compiled.Family(lambda: None, lambda: 1 / 0))
    monkeypatch.setattr(shapes, "CELLS", [(name, "lora") for name in ("opt", "untrainable", "failing")])
    monkeypatch.setattr(shapes, "collect", lambda cells, *_: ((cell, shapes.row_of(cell, "cpu")) for cell in cells))
    monkeypatch.setattr(sys, "argv", ["changing_shapes.py", "--out", str(out)])
    assert shapes.main() == 1
    runs = json.loads(out.read_text())["runs"]
    assert [run["status"] for run in runs] == ["ok", "skipped", "failed"], runs
    assert runs[0]["compiles"] == [2] and runs[0]["error"] < 1.1 * runs[0]["eager_error"] and not runs[0]["wrong"]
    table = report.render_shapes(tmp_path).splitlines()
    assert "| 2 |" in table[2] and table[3].startswith("| failing | failed"), table
