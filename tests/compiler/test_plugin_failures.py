"""A pass of an installed package that fails late: it costs itself alone, graphs are as they were, and the report names it."""

from __future__ import annotations

import logging
import re
import sys

import pytest
import torch

from tests.support.notes import find, has, logged
from tests.support.plugins import trained_as_before
from tunecompile import passes
from tunecompile.compiler.backend import without_packages
from tunecompile.compiler.pass_manager import Pass
from tunecompile.compiler.plugin_sandbox import GraphBackup, InvalidGraph

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


@pytest.mark.parametrize(
    "kind, stage", [*((kind, "recognize") for kind in FAILURES), ("raises", "plan"), ("raises", "lower")]
)
def test_a_pass_that_fails_costs_itself(install, caplog, kind, stage):
    body, said = FAILURES[kind]
    install(
        "bad",
        f"CALLS = []\ndef bad(graph, context):\n    CALLS.append(context.notes.append('half done'))\n{body}\n"
        f"PASSES = [Pass('bad', {stage!r}, bad), Pass('builds_on_it', {stage!r}, nothing, requires=frozenset({{'bad'}}))]",
    )
    install("good", f"PASSES = Pass('good', {stage!r}, nothing)")
    with caplog.at_level(logging.WARNING, "tunecompile"):
        report = trained_as_before()
    (note,) = find(report, "pass-switched-off", subject="bad", package="bad 1.2")
    assert said in note.detail and logged(caplog.records) == ["pass-switched-off"]
    assert [record.getMessage() for record in caplog.records] == [f"tunecompile: {note}"]
    assert "good ran" in report.notes and "bad ran" not in report.notes and "half done" not in report.notes
    assert {m.family: m.rewritten for m in report.matches if m.found} == {"swiglu": 1} and not find(
        report, "compiled-without-rewrites"
    )
    assert len(sys.modules["bad"].CALLS) == 1


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


@pytest.mark.parametrize("key", ["example_value", "val"])
def test_a_graph_is_compared_with_what_it_was(key):
    """New nodes need a value if anything reads them, and the graph takes and returns the same."""
    graph = torch.fx.symbolic_trace(lambda x, y: torch.neg(x + y)).graph
    for node in graph.nodes:
        node.meta[key] = torch.empty(3)
    backup, (_, _, added, negated, end) = GraphBackup(graph), graph.nodes
    with graph.inserting_before(negated):
        made = graph.call_function(torch.abs, (added,))
    backup.compare(key)
    negated.replace_input_with(added, made)
    with pytest.raises(InvalidGraph, match=f"abs.*has no fake value.*{key}"):
        backup.compare(key)
    made.meta[key] = torch.empty(3)
    backup.compare(key)
    for other, wrong in (
        (torch.empty(4), "(4,)"),
        (torch.empty(3).double(), "float64"),
        (torch.empty(3, device="meta"), "meta"),
    ):
        negated.meta[key] = other
        with pytest.raises(InvalidGraph, match=re.escape(wrong)):
            backup.compare(key)
    negated.meta[key] = torch.empty(3)
    backup.compare(key)
    end.args = ((negated, negated),)
    with pytest.raises(InvalidGraph, match="2 outputs instead of 1"):
        backup.compare(key)


def test_a_lost_gradient_is_no_valid_graph(install):
    install(
        "lost",
        "def cut(graph, context):\n    out = graph.output_node()\n    old = out.all_input_nodes[0]\n    with graph.inserting_before(out):\n"
        "        new = graph.call_function(torch.detach, (old,))\n    new.meta['example_value'] = old.meta['example_value'].detach()\n"
        "    out.args = torch.fx.map_arg(out.args, lambda n: new)\nPASSES = Pass('cut', 'recognize', cut)",
    )
    (note,) = find(trained_as_before(), "pass-switched-off")
    assert "instead of float32" in note.detail and note.detail.endswith("with a gradient")


def test_one_that_makes_compilation_fail_later_is_found(install):
    """Its graph looks well: only tracing it fails."""
    install("innocent", "PASSES = Pass('innocent', 'recognize', nothing)")
    install(
        "later",
        """
@op(cost=Cost.POINTWISE)
def planted_in_tests(x: Tensor) -> Tensor:
    if FAILS:
        raise ZeroDivisionError("planted")
    return F.silu(x)
FAILS = False

@planted_in_tests.backward(saves=("x",), gives=("x",))
def planted_in_tests_backward(grad: Tensor, x: Tensor) -> list[Tensor]:
    return [grad]

def put(graph, context):
    global FAILS
    node = graph.find_nodes(op="call_function", target=F.silu)[0]
    node.target = planted_in_tests.overload
    FAILS = True
PASSES = Pass('later', 'recognize', put)
""",
    )
    report = trained_as_before()
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
    report = trained_as_before()
    assert has(report, "compiled-without-rewrites", detail="ours") and not find(report, "pass-switched-off")


@pytest.mark.parametrize("bad, off", [("a", "a"), ("b", "b"), ("ab", "ab"), ("", None), ("never", None)])
def test_passes_whose_graph_fails_late(bad, off):
    """One is at fault, or two together, or none. Catches one that stays off without need, and two that are not tried."""

    class Package:
        def __init__(self):
            self.failed = {}

        def describe_failure(self, name):
            return f"{name} failed"

    guests = [Pass(name, "lower", print, package=Package()) for name in "ab"]
    passes = [Pass("ours", "lower", print), *guests]
    tried = []

    def attempt():
        tried.append({each.name for each in guests if each.package.failed})
        if bad and set(bad) <= tried[-1]:
            return "code"
        raise RuntimeError("no code")

    made = without_packages("layers", passes, RuntimeError("no code"), attempt)
    assert made == ("code" if off else None)
    assert {each.name for each in guests if each.package.failed} == set(off or "")
    assert tried == [{"a"}, {"b"}, {"a", "b"}][: len(tried)]
