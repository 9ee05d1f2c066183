"""Rewriting of graphs: what a node is said to come from, and its value."""

import pytest
import torch

from tunecompile._torch.fake_tensors import FakeTensorMode
from tunecompile.ir.rewrite import annotate, user_frame


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
