"""Tests share helpers by `tests.support` and fixtures by conftest.py, and the names that they read are there."""

import ast
import logging
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.durations import PHASES, TRACES, Durations, note_traces, summary
from tests.support.names import missing

ROOT = Path(__file__).parents[1]


def imported(code: str) -> list[str]:
    """Modules that the code imports, late imports and those of code in strings included."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            found += strings(node.value)
    return found


def strings(text: str) -> list[str]:
    try:
        return imported(text)
    except SyntaxError:
        return []


def shared(code: str) -> list[str]:
    return [
        module
        for module in imported(code)
        if module.startswith("tests.")
        and any(part.startswith("test_") or part == "conftest" for part in module.split("."))
    ]


def test_no_test_imports_from_a_test():
    files = {*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")} - {Path(__file__)}
    assert len(files) > 100
    assert {
        str(path.relative_to(ROOT)): found for path in sorted(files) if (found := shared(path.read_text("utf-8")))
    } == {}


@pytest.mark.parametrize(
    "code",
    [
        "from tests.ops.test_lora import arguments",
        "from tests.ops import test_lora",
        "def late():\n    import tests.ops.test_lora",
        "STEP = '''\nfrom tests.models.test_gpu import build\n'''",
        "from tests.passes.conftest import check",
    ],
)
def test_it_would_be_seen(code):
    assert shared(code)


@pytest.fixture(scope="module")
def environment():
    """As it was before the tests that request it, and has to be behind them: their own fixtures end earlier."""

    def seen():
        return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}

    before = seen()
    yield
    assert seen() == before, "tests that come later, and processes that they start, would have it"


def test_what_a_test_leaves_in_the_environment_is_gone(environment):
    """One name is new, one has another value, and one is missing."""
    os.environ.update(TUNECOMPILE_LEFT="1", HF_HUB_OFFLINE=os.environ["HF_HUB_OFFLINE"] + "0")
    del os.environ["TOKENIZERS_PARALLELISM"]


@pytest.mark.skipif("TORCH_TRACE" in os.environ, reason="somebody reads it")
def test_nobody_listens_to_torchs_structured_trace():
    """It would have each graph of each test as text."""
    assert logging.getLogger("torch.__trace").handlers == []


def test_names_that_tests_and_benchmarks_read_are_there():
    """Slow tests and those for a GPU run seldom: a name that goes would be missed there for weeks."""
    files = {file for folder in ("tests", "benchmarks", "docs") for file in ROOT.glob(f"{folder}/**/*.py")}
    assert len(files) > 400
    assert {
        str(path.relative_to(ROOT)): gone
        for path in sorted(files - {Path(__file__)})
        if (gone := {*missing(path.read_text("utf-8"))})
    } == {}


@pytest.mark.parametrize(
    "code, gone",
    [
        ("from tunecompile.errors import Gone", "tunecompile.errors.Gone"),
        ("def late():\n    import tunecompile.gone", "tunecompile.gone"),
        ("from tunecompile.runtime.layers import region\nregion.gone", "region.gone"),
        ("from tunecompile.runtime.layers import region\npatch.setattr(region, 'gone', 1)", "region.gone"),
        ("patch.setattr('tunecompile.runtime.layers.region.gone', 1)", "'tunecompile.runtime.layers.region'.gone"),
        (
            "import tunecompile.runtime.layers.region\ntunecompile.runtime.layers.region.gone()",
            "tunecompile.runtime.layers.region.gone",
        ),
        ("from tunecompile.runtime.layers.region import Region as It\nIt.gone", "It.gone"),
        ("from tunecompile.passes import gone", "tunecompile.passes.gone"),
        ("CODE = '''\nfrom tests.support.batches import gone\n'''", "tests.support.batches.gone"),
    ],
)
def test_a_name_that_is_gone_is_seen(code, gone):
    assert {*missing(code)} == {gone}


@pytest.mark.parametrize(
    "code",
    [
        "from tunecompile.passes.plan import probe\nprobe.__name__",
        "from tunecompile.runtime.layers.region import Region\nRegion.variants, Region.__init__",
        "from tunecompile import verify, report\nverify.any, report.any",
        "import tunecompile.passes\ntunecompile.passes.recognize",
        "from tunecompile.runtime.layers import region\nregion = 1\nregion.any",
        "patch.setattr('tunecompile.runtime.layers.region.new', 1, raising=False)",
    ],
)
def test_a_name_that_is_there_or_not_known_is_none(code):
    assert not {*missing(code)}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_takes_the_name_of_one_test():
    name = "tests/ops/test_lora.py::test_stacked[two:1]"
    made = subprocess.run(["make", "-n", "test", f"ARGS={name}"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0 and name in made.stdout, made.stderr


def test_durations_are_written_and_summed_up(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    import torch._dynamo.convert_frame as frames

    monkeypatch.setattr(frames, "_compile", frames._compile)
    note_traces()
    known = len(TRACES)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert len(TRACES) == known + 1
    durations, used = Durations(tmp_path / "new" / "tests.json"), [("used", (2.5, 3, 1.5))]
    for name, seconds in (("tests/a/test_x.py::test_it[1/2]", 4.0), ("tests/b/test_y.py::test_it", 1.0)):
        about = {"nodeid": name, "worker_id": "gw1"}
        for phase in PHASES:
            report = SimpleNamespace(when=phase, duration=seconds, user_properties=used, **about)
            durations.pytest_runtest_logreport(report)
    durations.pytest_testnodedown(
        SimpleNamespace(gateway=SimpleNamespace(id="gw1"), workeroutput={"collection": 7}), None
    )
    durations.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))
    text = " ".join(summary(durations.path).split())
    assert "gw1: setup 5, call 5, teardown 5, collection 7 s" in text
    assert "12.0 2.5 1 3 1.5 tests/a 3.0 2.5 1 3 1.5 tests/b" in text
    assert "12.0 2.5 1 3 1.5 tests/a/test_x.py::test_it[1/2]" in text
