"""Passes of installed packages: found, used and reported by name; what is wrong with one is told, and costs that package alone."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import tunecompile
from tests.support.notes import find, has
from tests.support.plugins import fresh, trained_as_before
from tunecompile import passes
from tunecompile.compiler import plugins
from tunecompile.compiler.partitioner import Lowering
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.compiler.plugins import compose, pipeline
from tunecompile.errors import InvalidPackage, UnknownEntryPoint

ROOT = Path(__file__).parents[1]

TRAIN = """
import sys
sys.path[:0] = sys.argv[1:]
import torch, torch.nn.functional as F
from torch import nn
import tunecompile

SPELLINGS = [lambda x: F.relu(x).square(), lambda x: F.relu(x) * F.relu(x), lambda x: torch.pow(nn.functional.relu(x), 2), lambda x: x.relu() ** 2]

class Block(nn.Module):
    def __init__(self, spelling):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(16, 24), nn.Linear(24, 16), SPELLINGS[spelling]

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

for spelling in range(len(SPELLINGS)):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(*(Block(spelling) for _ in range(3)))).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    tunecompile.optimize(model, executor="inductor" if spelling == 0 else "eager")
    model(x).square().mean().backward()
    for p, g in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, g, rtol=1e-10, atol=1e-12)
    report = tunecompile.report(model)
    found = {m.family: (m.found, m.rewritten) for m in report.matches}
    assert found["squared_relu"] == (1, 1), report
    (region,) = report.regions
    assert region.providers == {"squared_relu: reference": 1, "squared_relu_backward: reference": 1}, region
    assert region.reasons["squared_relu: reference"] == ["triton: not on a GPU"]
    assert "passes of squared-relu 0.1.0: squared_relu, squared_relu_bytes" in str(report), report
    assert any("1 squared ReLUs" in note for note in report.notes), report
    assert not [note for note in report.notes if note.code == "pass-switched-off"], report
print("fine")
"""

KERNEL = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from squared_relu import kernel, squared_relu

for dtype in (torch.float16, torch.float32):
    x = torch.randn(3, 700, dtype=dtype)
    torch.testing.assert_close(kernel.forward(x), squared_relu.reference(x))
x[0, 0] = float("nan")
assert kernel.forward(x).isnan().sum() == 1
print("fine")
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """The package as pip installs it."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(
        ROOT / "packages" / "squared_relu", tmp_path_factory.mktemp("source") / "squared_relu"
    )  # pip builds where it lies
    with open(source / "squared_relu" / "__init__.py", "a") as file:
        file.write(fresh())
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        folder,
        source,
    ]
    subprocess.run(command, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    return folder


def run(script: str, *paths: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, paths)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("fine"), done.stdout + done.stderr


@pytest.mark.slow
def test_the_example_is_found_rewritten_and_right(example):
    run(TRAIN, ROOT.parent, example)


@pytest.mark.slow
def test_the_kernel_of_the_example(example):
    pytest.importorskip("triton")
    run(KERNEL, ROOT.parent, example, TRITON_INTERPRET="1")


# ---------------------------------------------------------------- packages made up here


def refused(*said: str) -> str:
    with pytest.raises(InvalidPackage) as raised:
        tunecompile.optimize(nn.Linear(2, 2))
    for words in said:
        assert words in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    "code, said",
    [
        ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("PASSES = [nothing]", "neither a Pass nor a list of Passes"),
        ("PASSES = Pass('swiglu', 'recognize', nothing)", "a pass by the name of swiglu comes with tunecompile"),
        ("PASSES = [Pass('mine', 'lower', nothing)] * 2", "a pass by the name of mine is brought by stranger 1.2"),
        (
            "PASSES = Pass('mine', 'middle', nothing)",
            "the stage of mine is 'middle', which is none of recognize, plan, lower",
        ),
        (
            "PASSES = Pass('mine', 'plan', nothing, requires=frozenset({'remat', 'theirs'}))",
            "mine requires theirs, which no earlier pass provides",
        ),
        (
            "PASSES = Pass('mine', 'recognize', nothing, requires=frozenset({'remat'}))",
            "mine requires remat, which no earlier pass provides",
        ),
        (
            "PASSES = Pass('mine', 'plan', nothing, conflicts=frozenset({'tile'}))",
            "mine conflicts with tile, which comes with tunecompile",
        ),
        (
            "@op(cost=Cost.POINTWISE)\ndef rope(x: Tensor) -> Tensor:\n    return x + 1",
            "Op 'rope' cannot be registered: the name is taken, by tunecompile.ops.rope",
        ),
        (
            "from tunecompile.ops import rope\nrope.provider('mine', supports=lambda *_: False)(lambda x: x)",
            "provider 'mine' takes ('x',)",
        ),
    ],
)
def test_what_is_wrong_is_told_at_once(install, code, said):
    install("stranger", code)
    refused(
        "stranger 1.2 brings passes that cannot be used", said, "set the environment variable TUNECOMPILE_PASSES=none"
    )


def test_two_packages_that_clash(install, monkeypatch):
    install("first", "PASSES = Pass('theirs', 'plan', nothing)")
    install("other", "PASSES = Pass('other', 'plan', nothing)")
    install("second", "PASSES = Pass('theirs', 'lower', nothing)")
    assert "first 1.2 brings" in refused(
        "a pass by the name of theirs is brought by second 1.2", "TUNECOMPILE_PASSES=other,second"
    )
    monkeypatch.setenv("TUNECOMPILE_PASSES", "other,second")
    report = trained_as_before()
    assert has(report, "package-passes", subject="other 1.2", detail="other")
    assert has(report, "package-passes", subject="second 1.2", detail="theirs")


def test_one_conflicts_with_another(install):
    install("first", "PASSES = Pass('one', 'plan', nothing)")
    install("second", "PASSES = Pass('two', 'plan', nothing, conflicts=frozenset({'one'}))")
    refused("first 1.2", "one conflicts with two, which is brought by second 1.2", "TUNECOMPILE_PASSES=second")


@pytest.mark.parametrize(
    "choice, ran",
    [
        (None, {"here", "there"}),
        ("none", set()),
        ("", set()),
        ("there", {"there"}),
        (" here, there ", {"here", "there"}),
    ],
)
def test_the_environment_says_which(install, monkeypatch, choice, ran):
    install("here", "PASSES = Pass('here', 'plan', nothing)")
    install("there", "PASSES = Pass('there', 'lower', nothing)")
    if choice is not None:
        monkeypatch.setenv("TUNECOMPILE_PASSES", choice)
    notes = trained_as_before().notes
    assert {name for name in ("here", "there") if f"{name} ran" in notes} == ran
    assert {note.detail for note in find(notes, "package-passes") if note.subject == f"{note.detail} 1.2"} == ran


def test_packages_are_used_in_the_same_order_by_all_ranks(monkeypatch):
    """By their own names first, whatever the order on the disk is, and whatever they call their entry points."""
    found = [
        SimpleNamespace(name=name, value=value, dist=dist and SimpleNamespace(name=dist, version="1.0"))
        for name, value, dist in (("a", "z", "zebra"), ("b", "a", "ant"), ("c", "b", None), ("a", "y", "ant"))
    ]
    for order in (found, found[::-1]):
        monkeypatch.setattr(plugins, "entry_points", lambda group, order=order: list(order))
        assert [(each.name, plugins.label(each)) for each in plugins.chosen(None)] == [
            ("c", ""),
            ("a", "ant 1.0"),
            ("b", "ant 1.0"),
            ("a", "zebra 1.0"),
        ]
        assert [each.name for each in plugins.chosen("b, a,none")] == ["a", "b", "a"]


def test_the_environment_names_one_that_is_not_there(install, monkeypatch):
    install("here", "PASSES = Pass('here', 'plan', nothing)")
    monkeypatch.setenv("TUNECOMPILE_PASSES", "hear")
    with pytest.raises(UnknownEntryPoint, match="names hear, .* Installed: here"):
        tunecompile.optimize(nn.Linear(2, 2))


def test_each_stands_as_early_as_it_may(install):
    def guest(name, stage, *requires):
        return Pass(name, stage, lambda graph, context: None, requires=frozenset(requires))

    others = [
        guest("late", "lower", "early"),
        guest("early", "lower", "choose_provider"),
        guest("wide", "recognize"),
        guest("narrow", "recognize"),
        guest("after", "recognize", "rope", "swiglu"),
        guest("tags", "plan"),
        guest("knows", "plan", "remat"),
        guest("ops", "lower"),
        guest("never", "plan", "ops"),
    ]
    made = [p.name for p in compose(passes.PIPELINE, others)]
    own = [p.name for p in passes.PIPELINE]
    assert [name for name in made if name in own] == own
    assert made[:3] == ["wide", "narrow", own[0]] and made[made.index("rope") + 1] == "after"
    assert made[made.index("widened") - 1] == "tags" and made[made.index("remat") + 1] == "knows"
    at, first = made.index("choose_provider"), next(p.name for p in passes.PIPELINE if p.stage == "lower")
    assert made[at : at + 3] == ["choose_provider", "early", "late"] and made[made.index(first) - 1] == "ops"
    assert "never" not in made


def test_compiled_code_depends_on_the_package_s_source(install):
    def key():
        return Lowering(pipeline(passes.PIPELINE), Context("r")).uuid()

    keys = [key()]
    for version, code in (("1", "PASSES = []"), ("1", "PASSES = [ ]"), ("2", "PASSES = [ ]")):
        install("providers", code, version)
        sys.modules.pop("providers", None)
        keys.append(key())
    assert len(set(keys)) == 4


def test_the_hash_of_a_module_is_of_its_whole_package(monkeypatch, tmp_path):
    """Compiled code comes from a cache only while no file of the package changed, wherever its passes are."""
    package = tmp_path / "a_package"
    (package / "inner").mkdir(parents=True)
    for file in ("__init__.py", "helpers.py", "inner/__init__.py", "inner/made.py"):
        (package / file).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("a_package.inner.made")
    before = plugins.digest("a_package.inner.made")
    for file in ("helpers.py", "inner/made.py"):
        (package / file).write_text("changed = True")
        assert before != (before := plugins.digest("a_package.inner.made"))
    assert before == plugins.digest("a_package") == plugins.digest("a_package.inner")
    (package / "helpers.py").rename(package / "helper.py")
    assert before != plugins.digest("a_package"), "names count"
    for name in ("a_package", "a_package.inner", "a_package.inner.made"):
        del sys.modules[name]
