"""Views in graphs of ATen's operators."""

import torch

from tunecompile._torch.fake_tensors import make_fx
from tunecompile.ir.views import base_of, is_view, with_strides

aten = torch.ops.aten


def parts(x):
    """A split's pieces are views, too; the results of a call that makes two tensors are none."""
    made = x * 2
    left, right = made.split(3, -1)
    values, places = (left.transpose(0, 1) + right.transpose(0, 1)).max(-1)
    return values.unsqueeze(0), places


def test_what_views_are_of():
    graph = make_fx(parts, tracing_mode="fake")(torch.randn(4, 6)).graph
    (made,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    turned = graph.find_nodes(op="call_function", target=aten.transpose.int)
    assert len(turned) == 2 and all(is_view(node) and base_of(node) is made for node in turned)
    (last,) = graph.find_nodes(op="call_function", target=aten.unsqueeze.default)
    values = last.args[0]
    assert is_view(last) and not is_view(values) and base_of(last) is values and base_of(made) is made
    (given,) = graph.find_nodes(op="placeholder")
    assert not is_view(given)


def test_sizes_and_strides_that_are_symbols():
    gm = make_fx(lambda x: x.sin().cos(), tracing_mode="symbolic")(torch.randn(4, 6))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    (reader,) = node.users
    node.meta["stack_trace"] = "here"
    view = with_strides(gm.graph, node)
    reader.replace_input_with(node, view)
    gm.graph.lint()
    gm.recompile()
    assert view.target is aten.as_strided.default and view.meta["stack_trace"] == "here"
    assert view.meta["val"].shape == node.meta["val"].shape
    x = torch.randn(5, 7)
    assert torch.equal(gm(x), x.sin().cos())
