"""The README is short and true: its code runs, its table is that of the results, its links lead somewhere."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import tunecompile
from tests.support import zoo

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 200  #: lines


def report() -> ModuleType:
    """benchmarks/report.py."""
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short():
    assert len(README.splitlines()) <= LONGEST


def test_its_code_runs(monkeypatch, capsys):
    """With a trainer of one step, and without code generation, which takes minutes on a CPU."""
    pytest.importorskip("peft")
    optimize = tunecompile.optimize
    monkeypatch.setattr(tunecompile, "optimize", lambda model, **given: optimize(model, executor="eager", **given))
    names = {"model": zoo.adapt(zoo.make("llama")), "arguments": None, "rows": zoo.batch()}
    names["SFTTrainer"] = lambda model, args, train_dataset: SimpleNamespace(
        train=lambda: zoo.step(model, train_dataset)
    )
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    for block in blocks:
        exec(block, names)
    assert blocks and re.search(r"lora +7 +7", capsys.readouterr().out)


def test_tables_are_those_of_the_results():
    assert report().outdated() == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if not link.startswith("https://"):
            file = ROOT / target
            broken += [link] if not file.exists() or (anchor and anchor not in anchors(file)) else []
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
