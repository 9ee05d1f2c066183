"""Notebooks of the docs: they parse, hold no outputs, and run on tiny models (slow)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.matrix.trl import words
from tests.support.notes import EAGER, find
from tunecompile.trainers import door

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict]:
    """The cells with code."""
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_they_parse_and_are_as_they_were_written():
    page = (ROOT / "docs/pages/guides/notebooks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([\w-]+\.ipynb)`", page)) == {notebook.name for notebook in NOTEBOOKS}
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for notebook in NOTEBOOKS:
        found = json.loads(notebook.read_text(encoding="utf-8"))
        assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
        ids = [cell["id"] for cell in found["cells"]]
        assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", each) for each in ids)
        install, parameters, *rest = cells(notebook)
        package, extra = re.fullmatch(r'%pip install -q "(\w+)\[(\w+)\]"', "".join(install["source"])).groups()
        assert package == project["name"] and extra in project["optional-dependencies"]
        assert parameters["metadata"]["tags"] == ["parameters"]
        for cell in (parameters, *rest):
            compile("".join(cell["source"]), notebook.name, "exec")
        assert not any(cell["outputs"] or cell["execution_count"] for cell in cells(notebook))


class Processor:
    """Of a tiny model that reads images: a real one has a tokenizer and a template of thousands of words."""

    def apply_chat_template(self, messages: list[dict], tokenize: bool) -> str:
        return " ".join(message["role"] for message in messages)

    def __call__(self, text: list[str], images: list, padding: bool, return_tensors: str) -> dict:
        from tests.support.models.images import images_of

        assert len(text) == len(images)
        made = images_of([(1, 4, 4)] * len(images), torch.bfloat16)
        return {name: value for name, value in made.items() if name != "labels"}


def folder_of(model: torch.nn.Module, folder: Path) -> str:
    model.save_pretrained(folder / "tiny")
    words().save_pretrained(folder / "tiny")
    return str(folder / "tiny")


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run(notebook, monkeypatch, tmp_path):
    """On the CPU, operation by operation, with a tiny model, few steps and short rows."""
    transformers = pytest.importorskip("transformers")
    for package in ("trl", "bitsandbytes", "PIL"):
        pytest.importorskip(package)
    met, optimize = [], tunecompile.optimize

    def eager(model, **given):
        met.append(optimize(model, **{**given, "executor": "eager"}))
        return model

    monkeypatch.setattr(tunecompile, "optimize", eager)
    monkeypatch.setattr(door, "optimize", eager)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *_: Processor())
    monkeypatch.setitem(os.environ, "WANDB_MODE", "disabled")
    family = {"mixture-of-experts": "olmoe"}.get(notebook.stem, "llama")
    if notebook.stem == "vision":
        from tests.support.models.images import qwen2_5_vl

        model = qwen2_5_vl()[0]
    else:
        model = zoo.make(family, num_hidden_layers=2)
    names = {"MODEL": folder_of(model, tmp_path), "FOLDER": str(tmp_path / "out"), "STEPS": 2}
    (tmp_path / "out").mkdir()
    names |= {"LENGTH": 32, "COMPLETION": 4, "ROWS": 4 if notebook.stem == "vision" else 1}
    space: dict = {}
    for cell in cells(notebook)[1:]:
        exec("".join(cell["source"]), space)
        if cell["metadata"].get("tags") == ["parameters"]:
            space.update(names)
    report = tunecompile.report(met[-1])
    assert report.compiles and not find(report, *EAGER), report
    assert any(Path(space["FOLDER"]).iterdir()) or notebook.stem == "24-gb-card"
