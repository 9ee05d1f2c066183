"""What the README shows is true: its example of a pass runs, and finds what it says."""

import importlib.util
import re
from pathlib import Path

import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tunecompile import passes

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x) / 30.0) * 30.0)


def test_the_pass_in_the_readme_runs(monkeypatch):
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "PASS" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    names = {}
    exec(code, names)  # noqa: S102: our own README
    monkeypatch.setattr(passes, "PIPELINE", [names["PASS"], *passes.PIPELINE])
    model, plain = zoo.Stack(Block, 3), zoo.Stack(Block, 3)
    plain.load_state_dict(model.state_dict())
    tunecompile.optimize(model, executor="eager")
    x = torch.randn(4, 16)
    for each in (model, plain):
        each.train()(x).backward()
    for ours, eager in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, eager.grad)
    found = {m["family"]: (m["found"], m["rewritten"]) for m in tunecompile.report(model).to_dict()["matches"]}
    assert found["soft_cap"] == (1, 1)


def test_the_files_in_the_readme_are_written(monkeypatch, tmp_path):
    shown = re.findall(r"^\d{4}\.\S+\.py$", README, re.M)
    (did,) = re.findall(r"`(after pass .*?)`", README)
    monkeypatch.setenv("TUNECOMPILE_DUMP", str(tmp_path))
    zoo.step(tunecompile.optimize(zoo.adapt(zoo.make("llama")), executor="eager"), zoo.batch())
    assert len(shown) > 3 and all((tmp_path / name).exists() for name in shown), sorted(file.name for file in tmp_path.iterdir())
    assert f"# {did}\n" in (tmp_path / next(name for name in shown if name.endswith("rms_norm.py"))).read_text(encoding="utf-8")


def test_the_table_is_that_of_the_measured_results():
    spec = importlib.util.spec_from_file_location("report", Path(__file__).parent.parent / "benchmarks" / "report.py")
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    assert report.section() == README.partition(report.BEGIN)[2].partition(report.END)[0]
    for (begin, end), made in ((report.SUPPORT, report.render_support(report.load_one("support.json"))), (report.SUITES, report.others_models())):
        assert made == README.partition(begin)[2].partition(end)[0]
