"""Public names have docstrings, the docs build without a warning, and the code of their pages runs."""

import builtins
import functools
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.notes import EAGER, find, has
from tests.support.reports import head_tally
from tunecompile import errors, passes

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"


def blocks(page: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.S)


def public() -> Iterator[tuple[str, object]]:
    """Public names, and the public methods of public classes."""
    for name in tunecompile.__all__:
        value = getattr(tunecompile, name)
        yield name, value
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if not method.startswith("_") and isinstance(
                    function, (property, staticmethod, classmethod, FunctionType)
                ):
                    yield f"{name}.{method}", function


def test_public_names_have_docstrings():
    assert [name for name, value in public() if not (value.__doc__ or "").strip()] == []


def test_errors_that_docstrings_name_exist():
    missing = []
    for name, value in public():
        section = (value.__doc__ or "").partition("Raises:\n")[2].partition("\n\n")[0]
        named = [
            error
            for line in re.findall(r"^ +((?:[A-Z]\w+)(?:, [A-Z]\w+)*): ", section, re.M)
            for error in line.split(", ")
        ]
        missing += [
            f"{name}: {error}" for error in named if not hasattr(errors, error) and not hasattr(builtins, error)
        ]
    assert missing == []


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    """In strict mode: pages, links, anchors, cross-references and docstrings are complete."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--config-file",
        ROOT / "docs" / "mkdocs.yml",
        "--site-dir",
        tmp_path,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = {
        address
        for page in tmp_path.rglob("*.html")
        for address in re.findall(
            r'<(?:script|link|img)[^>]* (?:src|href)="(https?://[^"]+)', page.read_text(encoding="utf-8")
        )
    }
    assert loaded == set(), "pages need no network"
    api = (tmp_path / "reference" / "api.html").read_text(encoding="utf-8")
    assert [name for name in tunecompile.__all__ if not re.search(rf"tunecompile\.{name}\W", api)] == []


@pytest.mark.parametrize("page", [page.relative_to(PAGES).as_posix() for page in sorted(PAGES.rglob("*.md"))])
def test_code_is_python(page):
    for block in blocks(page):
        compile(block, page, "exec")


# -- what the pages show -----------------------------------------------------------------------------------------------


@pytest.fixture
def op_by_op(monkeypatch):
    """Nothing is compiled to machine code, which takes minutes on a CPU."""
    optimize = tunecompile.optimize
    monkeypatch.setattr(tunecompile, "optimize", lambda model, **given: optimize(model, executor="eager", **given))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "way",
    [*(pytest.param(way, marks=pytest.mark.slow) for way in ("Trainer(", "SFTTrainer(")), "for batch in batches"],
)
def test_the_quickstart_runs(way, op_by_op, monkeypatch, tmp_path):
    trl = pytest.importorskip("trl")
    monkeypatch.setattr(
        trl, "SFTConfig", functools.partial(trl.SFTConfig, use_cpu=not torch.cuda.is_available())
    )  # it wants bf16 of a GPU
    datasets = pytest.importorskip("datasets")
    from tests.support.matrix.trl import words

    (block,) = [block for block in blocks("quickstart.md") if re.search(rf"(^|\W){re.escape(way)}", block)]
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 255, (8, 12)).tolist()]
    if way == "SFTTrainer(":
        rows = datasets.Dataset.from_list(
            [{"text": " ".join(f"w{token}" for token in row["input_ids"])} for row in rows]
        )
    names = {
        "model": zoo.make("llama"),
        "rows": rows,
        "batches": [zoo.batch(), zoo.batch(seed=2)],
        "folder": str(tmp_path),
        "tokenizer": words(),
    }
    exec(block, names)
    report = tunecompile.report(names["model"])
    assert report.compiles and not find(report, *EAGER), report


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_diffusion_runs(op_by_op):
    from tests.support.models.diffusion import batch, flux

    block, _ = blocks("guides/diffusion.md")
    names = {"transformer": flux().train(), "batches": [without_dict(*batch(flux, height=side)) for side in (2, 3)]}
    exec(block, names)
    report = tunecompile.report(names["transformer"])
    assert report.compiles == 2 and not find(report, *EAGER), report


def without_dict(inputs, velocity):
    return {name: given for name, given in inputs.items() if name != "return_dict"}, velocity


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_the_guide_runs(op_by_op):
    accelerate = pytest.importorskip("accelerate")
    (block,) = [block for block in blocks("guides/loops.md") if "Accelerator" in block]
    names = {"model": zoo.adapt(zoo.make("llama")).train(), "batches": [zoo.batch(), zoo.batch(seed=2)]}
    exec(block, names)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert tunecompile.report(names["model"]).compiles and names["watcher"].steps == 2
    assert names["watcher"].findings == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_callback_of_the_guide_runs(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tunecompile.trainers import door

    optimize = door.optimize
    monkeypatch.setattr(door, "optimize", lambda model, **given: optimize(model, executor="eager", **given))
    cpu = functools.partial(transformers.TrainingArguments, use_cpu=not torch.cuda.is_available())
    monkeypatch.setattr(transformers, "TrainingArguments", cpu)
    (block,) = blocks("guides/switching-on.md")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 255, (8, 12)).tolist()]
    names = {"model": zoo.make("llama"), "rows": rows, "folder": str(tmp_path)}
    exec(block, names)
    assert names["callback"].report().compiles


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["DPO", "GRPO", "KTO", "RLOO", "Reward", "Distillation"])
def test_trls_trainers_run(kind, op_by_op, monkeypatch, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tests.support.matrix import trl as rows

    if not hasattr(trl, f"{kind}Trainer"):
        pytest.skip("this TRL has no such trainer")
    config = functools.partial(getattr(trl, f"{kind}Config"), use_cpu=not torch.cuda.is_available(), bf16=False)
    monkeypatch.setattr(trl, f"{kind}Config", functools.partial(config, per_device_train_batch_size=4))
    (block,) = [block for block in blocks("guides/trl.md") if re.search(rf"^{kind}Trainer\(", block, re.M)]
    kinds = {"task_type": "SEQ_CLS"} if kind == "Reward" else {}
    names = {
        "model": zoo.adapt(rows.classifier() if kind == "Reward" else zoo.make("llama"), **kinds),
        "teacher": zoo.make("llama", num_hidden_layers=2),
        "folder": str(tmp_path),
        "tokenizer": rows.words(),
        "reward": rows.reward,
        **{name: datasets.Dataset.from_list(getattr(rows, name)()) for name in ("pairs", "prompts", "judged")},
    }
    exec(block, names)
    report = tunecompile.report(names["model"])
    assert report.compiles and not find(report, *EAGER, "fused-head-left"), report
    reads_logits = kind in ("Reward", "Distillation")  # a score, and a teacher's whole distribution
    assert reads_logits or head_tally(names["model"]).rewritten == 1, report
    assert has(report, "checkpointing-is-budget")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x) / 30.0) * 30.0)


def test_the_pass_of_twenty_lines_runs(monkeypatch):
    code = next(block for block in blocks("develop/add-a-pass.md") if "PASS" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    names = {}
    exec(code, names)
    monkeypatch.setattr(passes, "PIPELINE", [names["PASS"], *passes.PIPELINE])
    model, plain = zoo.Stack(Block, 3), zoo.Stack(Block, 3)
    plain.load_state_dict(model.state_dict())
    tunecompile.optimize(model, executor="eager")
    x = torch.randn(4, 16)
    for each in (model, plain):
        each.train()(x).backward()
    for ours, eager in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, eager.grad)
    found = {m["family"]: (m["found"], m["rewritten"]) for m in tunecompile.report(model).to_dict()["matches"]}
    assert found["soft_cap"] == (1, 1)


def test_the_dumped_files_are_those_shown(monkeypatch, tmp_path):
    page = (PAGES / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\d{4}\.\S+\.py$", page, re.M)
    (did,) = re.findall(r"`(after pass .*?)`", page)
    monkeypatch.setenv("TUNECOMPILE_DUMP", str(tmp_path))
    zoo.step(tunecompile.optimize(zoo.adapt(zoo.make("llama")), executor="eager"), zoo.batch())
    assert len(shown) > 3 and all((tmp_path / name).exists() for name in shown), sorted(
        file.name for file in tmp_path.iterdir()
    )
    assert f"# {did}\n" in (tmp_path / next(name for name in shown if name.endswith("rms_norm.py"))).read_text(
        encoding="utf-8"
    )


def test_paths_that_pages_name_exist():
    found = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(PAGES.rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for path in re.findall(
            r"`((?:tunecompile|passes|templates|tests|benchmarks|docs|compiler|runtime|ir)/[\w/.]+)`", text
        ):
            places = (ROOT / path, ROOT / "tunecompile" / path, ROOT / "tunecompile" / f"{path}.py")
            found += [] if any(place.exists() for place in places) else [f"{page.relative_to(ROOT)}: {path}"]
    assert found == []
