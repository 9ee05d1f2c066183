"""Passes of installed packages: found, used and reported by name; what is wrong with one is told, and costs that package alone."""

import logging
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.notes import find, has, logged
from tunecompile import passes
from tunecompile.compiler.partitioner import Lowering
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.compiler.plugin_sandbox import GraphBackup
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


def fresh() -> str:
    """A line of source that no run had before: code out of Inductor's caches would have met no plan and no lower pass."""
    return f"\n# {uuid.uuid4()}\n"


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


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, code) puts a package there as pip would; its entry point by that name is PASSES of the code."""
    monkeypatch.delenv("TUNECOMPILE_PASSES", raising=False)
    made = []

    def write(name: str, code: str, version: str = "1.2") -> None:
        folder = tmp_path / f"site{len(made)}"
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(HEADER + code + fresh())
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[tunecompile.passes]\n{name} = {name}:PASSES\n")
        made.append(name)
        monkeypatch.syspath_prepend(folder)

    yield write
    for name in made:
        sys.modules.pop(name, None)


HEADER = """
import torch, torch.nn.functional as F
from torch import Tensor
from tunecompile import Cost, Pass, op, recognize, rewrite

def nothing(graph, context):
    context.notes.append(f"{__name__} ran")

"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)) * self.up(x))


def step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(3, 8)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def trained(**options) -> tunecompile.api.Report:
    """Of a model whose gradients, optimized, are those it had."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(Block() for _ in range(3))))
    expected = step(model)
    tunecompile.optimize(model, **{"executor": "eager", **options})
    for _ in range(2):
        torch.testing.assert_close(step(model), expected)
    return tunecompile.report(model)


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
    report = trained()
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
    notes = trained().notes
    assert {name for name in ("here", "there") if f"{name} ran" in notes} == ran
    assert {note.detail for note in find(notes, "package-passes") if note.subject == f"{note.detail} 1.2"} == ran


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
    assert made[made.index("tile") - 1] == "tags" and made[made.index("remat") + 1] == "knows"
    at = made.index("choose_provider")
    assert made[at - 1 : at + 3] == ["ops", "choose_provider", "early", "late"] and "never" not in made


def test_compiled_code_depends_on_the_package_s_source(install):
    def key():
        return Lowering(pipeline(passes.PIPELINE), Context("r")).uuid()

    keys = [key()]
    for version, code in (("1", "PASSES = []"), ("1", "PASSES = [ ]"), ("2", "PASSES = [ ]")):
        install("providers", code, version)
        sys.modules.pop("providers", None)
        keys.append(key())
    assert len(set(keys)) == 4


# ---------------------------------------------------------------- what fails later

FAILURES = {  # what a pass does to a graph, and what is said of it
    "raises": (
        "    first = list(graph.nodes)[-2]\n    graph.inserting_before(first)\n    graph.call_function(torch.neg, (first,))\n"
        "    raise KeyError('planted')",
        "KeyError: 'planted'",
    ),
    "unlinked": (
        "    first, last = list(graph.nodes)[0], list(graph.nodes)[-2]\n    first.append(last)",
        "RuntimeError",
    ),
    "shorter": (
        "    out = graph.output_node()\n    leaves = torch.utils._pytree.tree_leaves(out.args[0])\n    out.args = (type(out.args[0])(leaves[:-1]),)\n"
        "    graph.eliminate_dead_code()",
        "outputs instead of",
    ),
    "wider": (
        "    out = graph.output_node()\n    old = next(n for n in out.all_input_nodes if n.op == 'call_function')\n"
        "    with graph.inserting_before(out):\n"
        "        new = graph.call_function(torch.ops.aten.to.dtype, (old, torch.float64))\n"
        "    new.meta = {key: old.meta[key].double() for key in ('val', 'example_value') if key in old.meta}\n"
        "    out.args = torch.fx.map_arg(out.args, lambda n: new if n is old else n)",
        "of the graph is float64",
    ),
    "blank": (
        "    old = next(n for n in graph.nodes if n.op == 'call_function' and n.users)\n    with graph.inserting_after(old):\n"
        "        new = graph.call_function(torch.ops.aten.alias.default, (old,))\n"
        "    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)",
        "has no fake value",
    ),
}


@pytest.mark.parametrize("stage", ["recognize", "plan", "lower"])
@pytest.mark.parametrize("kind", list(FAILURES))
def test_a_pass_that_fails_costs_itself(install, caplog, kind, stage):
    body, said = FAILURES[kind]
    install(
        "bad",
        f"CALLS = []\ndef bad(graph, context):\n    CALLS.append(context.notes.append('half done'))\n{body}\n"
        f"PASSES = [Pass('bad', {stage!r}, bad), Pass('builds_on_it', {stage!r}, nothing, requires=frozenset({{'bad'}}))]",
    )
    install("good", f"PASSES = Pass('good', {stage!r}, nothing)")
    with caplog.at_level(logging.WARNING, "tunecompile"):
        report = trained()
    (note,) = find(report, "pass-switched-off", subject="bad", package="bad 1.2")
    assert said in note.detail and logged(caplog.records) == ["pass-switched-off"]
    assert [record.getMessage() for record in caplog.records] == [f"tunecompile: {note}"]
    assert "good ran" in report.notes and "bad ran" not in report.notes and "half done" not in report.notes
    assert {m.family: m.rewritten for m in report.matches if m.found} == {"swiglu": 1} and not find(
        report, "compiled-without-rewrites"
    )
    assert len(sys.modules["bad"].CALLS) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["plan", "lower"])
def test_generated_code_is_that_without_it(install, stage):
    install("bad", f"def bad(graph, context):\n{FAILURES['raises'][0]}\nPASSES = Pass('bad', {stage!r}, bad)")
    assert has(trained(executor="inductor"), "pass-switched-off")


def test_a_graph_is_restored_to_the_letter():
    graph = torch.fx.symbolic_trace(lambda x, y: (torch.neg(x + y), {"both": y * 2 + x})).graph
    for i, node in enumerate(graph.nodes):
        node.meta["val"] = i

    def state():
        return str(graph), [(node.name, node.op, node.target, node.meta["val"]) for node in graph.nodes]

    before, snapshot = state(), GraphBackup(graph)
    x, y, added, *_ = graph.nodes
    graph.inserting_before(added)
    wrong = graph.call_function(torch.neg, (x,))
    added.replace_all_uses_with(wrong)
    graph.erase_node(added)
    y.meta["val"] = 7
    graph.output_node().args = (wrong,)
    snapshot.restore()
    assert state() == before
    graph.lint()
    assert graph.call_function(torch.neg, (next(iter(graph.nodes)),)) is list(graph.nodes)[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["budget", *(pytest.param(how, marks=pytest.mark.slow) for how in ("adapted", "checkpointed", "padded"))]
)
def test_passes_that_change_nothing_stay_on(install, how):
    install(
        "idle",
        "PASSES = [Pass(f'{stage}{i}', stage, nothing, requires=frozenset(after)) for stage, requires in "
        "[('recognize', [[], ['lora_mlp']]), ('plan', [[], ['remat']]), ('lower', [[], ['choose_provider'], ['cleanup']])] "
        "for i, after in enumerate(requires)]",
    )
    model = zoo.make("llama")
    model = zoo.adapt(model) if how == "adapted" else model
    batches = [zoo.batch(length=length) for length in (16, 24, 20)]
    for batch in batches if how == "padded" else []:
        batch["attention_mask"] = (torch.arange(batch["labels"].shape[1]) < torch.tensor([[9], [14]])).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
    expected = [zoo.step(model, batch)[1] for batch in batches]
    if how == "checkpointed":
        model.gradient_checkpointing_enable()
    tunecompile.optimize(model, executor="eager", memory="600KiB" if how == "budget" else None)
    for batch, gradients in zip(batches, expected):
        assert max(zoo.errors(zoo.step(model, batch)[1], gradients).values()) < 1e-4
    report = tunecompile.report(model)
    assert "idle ran" in report.notes and not find(report, "pass-switched-off"), str(report)


def test_a_lost_gradient_is_no_valid_graph(install):
    install(
        "lost",
        "def cut(graph, context):\n    out = graph.output_node()\n    old = out.all_input_nodes[0]\n    with graph.inserting_before(out):\n"
        "        new = graph.call_function(torch.detach, (old,))\n    new.meta['example_value'] = old.meta['example_value'].detach()\n"
        "    out.args = torch.fx.map_arg(out.args, lambda n: new)\nPASSES = Pass('cut', 'recognize', cut)",
    )
    (note,) = find(trained(), "pass-switched-off")
    assert "instead of float32" in note.detail and note.detail.endswith("with a gradient")


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_that_makes_compilation_fail_later_is_found(install, executor):
    """Its graph looks well: only tracing it fails."""
    install("innocent", "PASSES = Pass('innocent', 'recognize', nothing)")
    install(
        "later",
        """
@op(cost=Cost.POINTWISE)
def planted_in_%s(x: Tensor) -> Tensor:
    if FAILS:
        raise ZeroDivisionError("planted")
    return F.silu(x)
FAILS = False

@planted_in_%s.backward(saves=("x",), gives=("x",))
def planted_in_%s_backward(grad: Tensor, x: Tensor) -> list[Tensor]:
    return [grad]

def put(graph, context):
    global FAILS
    node = graph.find_nodes(op="call_function", target=F.silu)[0]
    node.target = planted_in_%s.overload
    FAILS = True
PASSES = Pass('later', 'recognize', put)
"""
        % ((executor,) * 4),
    )
    report = trained(executor=executor)
    (note,) = find(report, "pass-switched-off", subject="later", package="later 1.2", reason="does-not-compile-with-it")
    assert "planted" in note.detail.detail
    assert "innocent ran" in report.notes and {m.family: m.rewritten for m in report.matches if m.found} == {
        "swiglu": 1
    }


def test_our_own_failure_is_not_laid_at_their_door(install, monkeypatch):
    def fail(graph, context):
        raise KeyError("ours")

    install("innocent", "PASSES = Pass('innocent', 'plan', nothing)")
    monkeypatch.setattr(passes, "PIPELINE", [*passes.PIPELINE, Pass("broken", "lower", fail)])
    report = trained()
    assert has(report, "compiled-without-rewrites", detail="ours") and not find(report, "pass-switched-off")


def test_verification_switches_off_what_makes_gradients_wrong(install):
    install(
        "wrong",
        """
def scale(graph, context):
    out = graph.output_node()
    old = next(node for node in out.all_input_nodes if node.op == "call_function")
    with graph.inserting_before(out):
        new = graph.call_function(torch.ops.aten.mul.Tensor, (old, 1.01))
    new.meta = dict(old.meta)
    out.args = torch.fx.map_arg(out.args, lambda n: new if n is old else n)
PASSES = Pass("scale", "lower", scale)
""",
    )

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return SimpleNamespace(loss=x.square().mean())

    model = tunecompile.optimize(Whole().train(), executor="eager")
    found = tunecompile.verify(model, {"x": torch.randn(4, 8)})
    assert not found.passed and [fault["rewrite"] for fault in found.faults] == ["scale"]
    assert tunecompile.verify(model, {"x": torch.randn(4, 8)}).passed
