"""Compiled code is looked up by all that it depends on: our source, the passes, the plan."""

import importlib.util
from operator import getitem
from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph

from tests.support.passes.functions import lora
from tests.support.passes.run import assert_same, random, results
from tunecompile.compiler import partitioner
from tunecompile.compiler.backend import Backend
from tunecompile.compiler.partitioner import HASHED, Lowering, Partitioner, source_hash
from tunecompile.compiler.pass_manager import Context
from tunecompile.passes import PIPELINE
from tunecompile.planner.solver import KEEP, Plan


def adapted(x, w, a, b):
    return torch.sin(lora(x, w, a, b))


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """Folders that stand for the packages, and a function that hashes them."""
    for package in (*HASHED, "cli"):
        (tmp_path / package / "deeper").mkdir(parents=True)
        (tmp_path / package / "one.py").write_text(f"a = {package!r}")
        (tmp_path / package / "deeper" / "two.py").write_text("b = 2")

    def found(name):
        return SimpleNamespace(submodule_search_locations=[str(tmp_path / name.removeprefix("tunecompile."))])

    def hashed():
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", found)
            return source_hash.__wrapped__()

    return tmp_path, hashed


@pytest.mark.parametrize("package", HASHED)
@pytest.mark.parametrize("file", ["one.py", "deeper/two.py"])
def test_a_file_that_changes(sources, package, file):
    root, hashed = sources
    before = hashed()
    assert hashed() == before
    (root / package / file).write_text("a = 3")
    assert hashed() != before


def renamed(package):
    (package / "one.py").rename(package / "other.py")


def moved(package):
    (package / "deeper" / "two.py").rename(package / "two.py")


def swapped(package):
    one, two = package / "one.py", package / "deeper" / "two.py"
    texts = one.read_text(), two.read_text()
    one.write_text(texts[1])
    two.write_text(texts[0])


def added(package):
    (package / "new.py").write_text("")


def removed(package):
    (package / "one.py").unlink()


@pytest.mark.parametrize("change", [renamed, moved, swapped, added, removed])
def test_files_that_move_come_or_go(sources, change):
    root, hashed = sources
    before = hashed()
    change(root / "passes")
    assert hashed() != before


def test_what_no_code_depends_on_is_not_hashed(sources):
    root, hashed = sources
    before = hashed()
    (root / "cli" / "one.py").write_text("a = 3")
    assert hashed() == before


def test_the_packages_are_found_where_they_are_installed(monkeypatch):
    """`passes` and `templates` lie beside the package in a checkout, and in it once installed."""
    expected, read = source_hash(), []
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: read.append(find(name)) or read[-1])
    assert source_hash.__wrapped__() == expected
    assert [spec.name for spec in read] == [f"tunecompile.{package}" for package in HASHED]


def halves(*saved, seen=(0,), outputs=1, sizes=False):
    """A forward graph of a call with three results that returns some of them, and a backward that makes them again.

    saved: results that the forward saves; seen: those that it reads.
    """
    forward, backward = Graph(), Graph()
    call = forward.call_function(torch.unbind, (forward.placeholder("x"),), name="call")
    results = {at: forward.call_function(getitem, (call, at), name=f"result_{at}") for at in seen}
    output = forward.output((results[seen[0]], *(results[at] for at in saved)))
    given = [backward.placeholder(f"result_{at}") for at in saved] + [backward.placeholder("tangents_1")]
    for node in given:
        node.meta["val"] = 3 if sizes else torch.empty(2)
    again = backward.call_function(torch.unbind, (given[0],), name="call")
    members = [backward.call_function(getitem, (again, at), name=f"again_{at}") for at in range(3)]
    for member in members:
        member.meta |= {"val": torch.empty(2), "recompute": 1, "ac_graph_id": 0}
    backward.output((backward.call_function(torch.stack, (members,)),))
    return forward, backward, output, members


def test_small_results_of_a_call_that_is_made_again_are_saved():
    """Ahead of what is saved anyway, each under the name of the forward's result; one that none reads is read for it."""
    forward, backward, output, members = halves(0)
    output.meta["desc"] = ["result", "saved"]
    for member in members[1:]:
        member.meta["pinned"] = True
    partitioner._save_pinned(forward, backward, 1)
    forward.lint()
    backward.lint()
    first, *saved, last = output.args[0]
    assert first is last and [(node.target, node.args[1]) for node in saved] == [(getitem, 1), (getitem, 2)]
    assert output.meta["desc"] == ["result", "saved", "saved", "saved"]
    given = backward.find_nodes(op="placeholder")
    assert [node.name for node in given] == [*(node.name for node in saved), "result_0", "tangents_1"]
    assert [set(node.meta) for node in given[:2]] == [{"val"}] * 2
    (stacked,) = backward.find_nodes(op="call_function", target=torch.stack)
    assert list(stacked.args[0]) == [members[0], *given[:2]] and len(backward.nodes) == 8


def test_results_that_are_saved_already_stay_as_they_are():
    """What is returned or saved, what is not marked, what is behind no saved tensor, and another call's."""
    for made, pinned, change in (
        (halves(0, 1, seen=(0, 1)), 1, None),
        (halves(0), None, None),
        (halves(0, sizes=True), 1, None),
        (
            halves(0),
            1,
            lambda forward: forward.find_nodes(op="call_function", target=torch.unbind)[0]._rename("another"),
        ),
    ):
        forward, backward, output, members = made
        if pinned is not None:
            members[pinned].meta["pinned"] = True
        if change is not None:
            change(forward)
        before = [str(forward), str(backward)]
        partitioner._save_pinned(forward, backward, 1)
        assert [str(forward), str(backward)] == before and "desc" not in output.meta
    forward, backward, output, members = halves(0)
    members[1].meta["pinned"] = True
    partitioner._save_pinned(forward, backward, 2)  # all are results, and nothing is saved
    assert len(output.args[0]) == 2


def test_a_plan_that_makes_a_product_again_saves_its_small_results():
    """Of an adapter's linear XA, 2 of 64 columns, so that its backward has no need of the adapter's first product."""
    args = [random(64, 64), random(64, 64, grad=False), random(2, 64), random(64, 2)]
    saved = {}
    for plan in (Plan(None), Plan(frozenset({0}))):  # all is made again: a model's own checkpointing
        torch._dynamo.reset()
        backend = Backend("test", PIPELINE, "eager", plan=plan)
        both = [sum(results(fn, args), []) for fn in (torch.compile(adapted, backend=backend), adapted)]
        assert_same(*both, tol=1e-5)
        (context,) = backend.contexts
        saved[plan] = [size for _, size in context.saved]
    assert list(saved.values()) == [[], [64 * 2 * 4]]


def test_bytes_of_what_a_forward_saves():
    """Each memory once, all of it; inputs are there anyway, and sizes are none."""
    graph = Graph()
    given = graph.placeholder("given")
    made, part, other, of_input, size = (graph.call_function(torch.neg, (given,), name=name) for name in "abcde")
    whole = torch.empty(8, 4)
    values = {given: torch.empty(5), made: whole[:2], part: whole[3:], other: torch.empty(3), size: 7}
    values[of_input] = values[given][1:]
    for node, value in values.items():
        node.meta["val"] = value
    graph.output((other, made, part, of_input, given, size, None, other))
    forward = torch.fx.GraphModule({}, graph)
    assert partitioner._saved(forward, 1) == [("a", 8 * 4 * 4), ("c", 3 * 4)]
    assert partitioner._saved(forward, 8) == []


PLANS = [
    KEEP,
    Plan(None),
    Plan(frozenset({0})),
    Plan(frozenset({1})),
    Plan(tiles=2),
    Plan(weights=True),
    Plan(None, attention=True),
]


@pytest.mark.parametrize("hook", [Partitioner, Lowering])
def test_the_key_differs_for_every_plan(hook):
    keys = {hook(PIPELINE, Context("r", plan)).uuid() for plan in PLANS}
    assert len(keys) == len(PLANS) and None not in keys


@pytest.mark.parametrize("hook", [Partitioner, Lowering])
def test_the_key_differs_for_other_source_and_other_passes(hook, monkeypatch):
    key = hook(PIPELINE, Context("r")).uuid()
    assert hook(PIPELINE, Context("another region")).uuid() == key
    assert hook(PIPELINE[1:], Context("r")).uuid() != key
    monkeypatch.setattr(partitioner, "source_hash", lambda: "other")
    assert hook(PIPELINE, Context("r")).uuid() != key


@pytest.mark.parametrize("hook", [Partitioner, Lowering])
def test_the_key_differs_for_all_else_that_code_depends_on(hook, monkeypatch):
    """A lower precision, the order of attention's kernels, and the card that is asked for in place of the real one."""
    contexts = [Context("r"), Context("r", precision="fp8"), Context("r", attention=("flash", "cudnn"))]
    contexts.append(Context("r", attention=("cudnn", "flash")))
    keys = [hook(PIPELINE, context).uuid() for context in contexts]
    for card in ("gfx1100", "sm_120"):
        monkeypatch.setattr(partitioner, "emulated", lambda: card)
        keys.append(hook(PIPELINE, contexts[0]).uuid())
    assert len(set(keys)) == 6 and None not in keys
