"""Rewriting of graphs: what a node is said to come from, and its value."""

import operator

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tunecompile._torch.fake_tensors import FakeTensorMode
from tunecompile.errors import InvalidRewrite
from tunecompile.ir.rewrite import annotate, apply, rewrite, user_frame


def test_the_line_of_a_node_is_the_users():
    """Not that of a function of torch's into which Dynamo looked, as it does into `grouped_mm`."""
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = (
        '  File "/lib/transformers/integrations/moe.py", line 12, in forward\n    out = grouped_mm(x)\n'
        '  File "/lib/torch/nn/functional.py", line 6741, in grouped_mm\n    return torch._grouped_mm(\n'
    )
    assert user_frame(node) == ("/lib/transformers/integrations/moe.py", "12", "out = grouped_mm(x)")


@pytest.mark.parametrize("fake", [True, False])
def test_a_new_node_has_the_value_of_its_operation(fake):
    """Also where graphs have real values, as some tools trace them."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = torch.ones(2, 3)
    x.meta["example_value"] = FakeTensorMode().from_tensor(made) if fake else made
    new = graph.call_method("sum", (x, 1))
    annotate(new, x)
    value = new.meta["example_value"]
    assert value.shape == (2,) and type(value) is type(x.meta["example_value"])
    assert fake or value.tolist() == [3.0, 3.0]


def test_a_new_node_has_the_line_of_what_it_replaces():
    """Where it has none of its own, for reports and for whoever reads generated code."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(example_value=torch.ones(2), stack_trace="a line", nn_module_stack={"layer": 1}, other=3)
    first, second = graph.call_function(torch.sin, (x,)), graph.call_function(torch.cos, (x,))
    second.meta["stack_trace"] = "its own"
    for node in (first, second):
        annotate(node, x)
    assert (first.meta["stack_trace"], second.meta["stack_trace"]) == ("a line", "its own")
    assert first.meta["nn_module_stack"] == {"layer": 1} and "other" not in first.meta


class Recorder(torch.fx.Interpreter):
    """Runs a graph, and notes what each node gives."""

    def run_node(self, n):
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


def recorded(fn, *values):
    """The graph of a function, each node with its value."""
    made = torch.fx.symbolic_trace(fn)
    Recorder(made).run(*values)
    return made.graph


def run(graph, *values):
    return torch.fx.GraphModule({}, graph)(*values)


def calls(graph):
    return [node.target for node in graph.nodes if node.op.startswith("call")]


@rewrite("sines", to=lambda x: torch.sin(x) * 1.0)
def SINES(x):
    return torch.sin(torch.sin(x))


def test_what_a_replacement_is_made_of_is_not_matched_again():
    """One call rewrites each place once; what it makes may look like the pattern."""
    x = torch.rand(3)
    graph = recorded(lambda x: torch.sin(torch.sin(torch.sin(torch.sin(torch.sin(x))))), x)
    places, reasons = apply(SINES, graph)
    assert len(places) == 2 and not reasons
    assert calls(graph) == [torch.sin, operator.mul, torch.sin, operator.mul, torch.sin]
    torch.testing.assert_close(run(graph, x), torch.sin(torch.sin(torch.sin(x))))


def test_tensors_of_a_subclass_are_left_to_torch():
    """Torchao's weights, say: an op that is put over them has no rule of theirs. Others are rewritten."""
    two = TwoTensor(torch.rand(3), torch.rand(3))
    graph = recorded(lambda x, y: (torch.sin(torch.sin(x)), torch.sin(torch.sin(y))), two, torch.rand(3))
    ((place,), (reason,)) = apply(SINES, graph)
    assert place == "sines" and "TwoTensor" in reason
    assert calls(graph) == [torch.sin, torch.sin, torch.sin, operator.mul]


def test_a_match_is_refused_with_its_reason():
    """By its guard, also where that fails, and where it would give another shape; others are rewritten."""
    values = torch.rand(3), torch.rand(4)

    def where(match):
        size = match.bound["x"].meta["example_value"].shape[0]
        return "of three" if size == 3 else str(1 // 0) if size == 2 else None

    @rewrite("of_guards", to=lambda x: torch.sin(x), where=where)
    def pattern(x):
        return torch.sin(torch.sin(x))

    graph = recorded(lambda x, y: (torch.sin(torch.sin(x)), torch.sin(torch.sin(y))), *values)
    assert apply(pattern, graph) == (["of_guards"], ["of_guards: of three"]) and len(calls(graph)) == 3
    graph = recorded(lambda x, y: torch.sin(torch.sin(x)), torch.rand(2), values[1])
    ((), (reason,)) = apply(pattern, graph)
    assert "its guard failed (ZeroDivisionError" in reason and len(calls(graph)) == 2

    @rewrite("of_sizes", to=lambda x: torch.sin(x)[1:])
    def shorter(x):
        return torch.sin(torch.sin(x))

    graph = recorded(lambda x: torch.sin(torch.sin(x)), values[0])
    ((), (reason,)) = apply(shorter, graph)
    assert reason == "of_sizes: the replacement is torch.float32 (2,), the original torch.float32 (3,)"
    assert calls(graph) == [torch.sin, torch.sin], "what was built is gone"


def test_numbers_have_no_shape_to_compare():
    @rewrite("of_numbers", to=lambda n: n * 2)
    def pattern(n):
        return n + n

    graph = recorded(lambda x: x.size(0) + x.size(0), torch.rand(3))
    first, second = graph.find_nodes(op="call_method", target="size")
    second.replace_all_uses_with(first)
    graph.erase_node(second)
    assert apply(pattern, graph) == (["of_numbers"], []) and run(graph, torch.rand(5)) == 10


def test_inputs_that_are_changed_later_and_results_that_are_read_too_early():
    """An op saves its inputs, and computes all of its results in one place."""

    @rewrite("of_two", to=lambda x: (torch.cos(x) * 1.0, torch.sin(x) * 1.0))
    def pattern(x):
        inner = torch.sin(x)
        return torch.cos(inner), inner

    def early(x):
        inner = torch.sin(x)
        other = torch.exp(inner)
        return torch.cos(inner) + other

    def late(x):
        inner = torch.sin(x)
        made = torch.cos(inner) + torch.exp(inner)
        return made

    def changed(x):
        inner = torch.sin(x)
        return torch.cos(inner) + inner + x.add_(1.0)

    for fn, reason in (
        (early, "of_two: an output is used before all of them are computed"),
        (changed, "of_two: an input is changed in place afterwards"),
    ):
        graph = recorded(fn, torch.rand(3))
        before = str(graph)
        assert apply(pattern, graph) == ([], [reason]) and str(graph) == before
    x, graph = torch.rand(3), recorded(late, torch.rand(3))
    assert apply(pattern, graph) == (["of_two"], [])
    torch.testing.assert_close(run(graph, x), x.cos() + x.sin().exp())

    def added(x, y):
        made = torch.cos(torch.sin(x))
        return y.add_(x) * made

    graph = recorded(added, torch.rand(3), torch.rand(3))
    assert apply(pattern, graph) == (["of_two"], []), "another tensor is changed"


def test_a_value_that_is_known_is_not_computed_again():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    new = graph.call_function(torch.sin, (x,))
    new.meta["example_value"] = known = torch.ones(7)
    annotate(new, x)
    assert new.meta["example_value"] is known


def test_a_replacement_takes_what_the_pattern_binds():
    with pytest.raises(InvalidRewrite, match=r"wrong.*takes \['other'\]"):

        @rewrite("wrong", to=lambda x, other: x)
        def _(x):
            return torch.sin(x)

    @rewrite("whole", to=lambda match, x: torch.sin(x) + len(match.nodes))
    def pattern(x):
        return torch.sin(torch.sin(x))

    x = torch.rand(3)
    graph = recorded(lambda x: torch.sin(torch.sin(x)), x)
    assert apply(pattern, graph) == (["whole"], []) and torch.equal(run(graph, x), x.sin() + 2)
