"""Contracts of passes, which of them run, and what is counted of their changes."""

import pytest
import torch
from torch.fx import Graph

from tunecompile.compiler.pass_manager import Context, MatchCount, Pass, live, run_stage, validate
from tunecompile.errors import InvalidPipeline


def step(name, stage="recognize", **contract):
    return Pass(name, stage, lambda graph, context: None, **{key: frozenset(names) for key, names in contract.items()})


@pytest.mark.parametrize(
    "passes, reason",
    [
        ([step("a"), step("a")], "stands twice"),
        ([step("a", "plan"), step("b")], "in the order"),
        ([step("a", "lower"), step("b", "plan")], "in the order"),
        ([step("a", requires=["b"]), step("b")], "a requires"),
        ([step("a", requires=["c"]), step("b", provides=["c"])], "a requires"),
        ([step("a", conflicts=["b"]), step("b")], "a conflicts with"),
        ([step("b"), step("a", conflicts=["b"])], "a conflicts with"),
    ],
)
def test_contracts_that_do_not_hold(passes, reason):
    with pytest.raises(InvalidPipeline, match=reason):
        validate(passes)


def test_contracts_that_hold():
    passes = [
        step("a", provides=["c"]),
        step("b", requires=["a", "c"], conflicts=["d"]),
        step("e", "plan", requires=["b"]),
        step("f", "lower"),
    ]
    assert validate(passes) == tuple(passes) == tuple(live(passes))


def test_changes_are_counted_by_stage_and_graph():
    """A pass that changes nothing is none of them; one of another stage does not run."""

    def turned(graph, context):
        (sine,) = graph.find_nodes(op="call_function", target=torch.sin)
        with graph.inserting_before(sine):
            sine.replace_all_uses_with(graph.call_function(torch.cos, sine.args))
        graph.erase_node(sine)

    graph, context = Graph(), Context("layer")
    graph.output(graph.call_function(torch.sin, (graph.placeholder("x"),)))
    passes = [step("idle"), Pass("turn", "recognize", turned), Pass("never", "lower", turned)]
    run_stage(passes, "recognize", graph, context)
    (change,) = context.changes
    assert (change.stage, change.graph, change.name) == ("recognize", "dynamo", "turn")
    assert change.operations == {"cos": 1, "sin": -1} and context.ran == {"recognize"}
    context.record("plan", graph)
    context.record("lower", graph)
    assert len(context.changes) == 1 and context.ran == {"recognize", "plan", "lower"}


@pytest.mark.parametrize("name, which", [("tangents_1", "backward"), ("primals_1", "forward")])
def test_lowered_graphs_are_told_apart_by_their_inputs(name, which):
    graph, context = Graph(), Context("layer")
    graph.output(graph.call_function(torch.sin, (graph.placeholder(name),)))
    run_stage(
        [Pass("cut", "lower", lambda graph, context: graph.call_function(torch.cos, (1,)))], "lower", graph, context
    )
    assert [change.graph for change in context.changes] == [which]


def test_anchors_are_counted_as_they_are_judged():
    tally = MatchCount("family")
    tally.refuse("no reason")
    tally.rewrote("here")
    tally.rewrote(anchors=3)
    tally.refuse("another", anchors=2)
    assert (tally.found, tally.rewritten) == (7, 4)
    assert tally.refused == ["no reason", "another"] and tally.places == ["here"]
