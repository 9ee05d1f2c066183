"""After lowering, fake values are those of the graph, and none is computed that is known."""

import importlib
import inspect

import torch
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tunecompile._torch.fake_tensors import is_computed
from tunecompile._torch.generation.fake_values import values_computed_once
from tunecompile.compiler.pass_manager import Context
from tunecompile.ops import gated_activation

LOWER = importlib.import_module("tunecompile.passes.lower.choose_provider").PASS


def lowered(updater):
    """silu(gate) * up of a symbol's rows, seen as another shape; and an updater that was there before."""
    mode, graph = FakeTensorMode(shape_env=ShapeEnv()), Graph()
    nodes = []

    def add(value, node):
        node.meta["val"] = value
        nodes.append(node)
        return node

    for name in ("gate", "up"):
        add(mode.from_tensor(torch.randn(6, 8), static_shapes=False), graph.placeholder(name))
    gate, up = nodes
    with mode:
        product = gated_activation(gate.meta["val"], up.meta["val"], "silu")
        call = add(product, graph.call_function(gated_activation.overload, (gate, up, "silu")))
        for function, *rest in ((torch.ops.aten.view.default, [-1, 2, 4]), (torch.ops.aten.permute.default, [1, 0, 2])):
            last = nodes[-1]
            add(function(last.meta["val"], *rest), graph.call_function(function, (last, *rest)))
        add(nodes[-1].meta["val"] * 2, graph.call_function(torch.ops.aten.mul.Tensor, (nodes[-1], 2)))
    graph.output((nodes[-1],))
    gm = GraphModule({}, graph)
    found = updater(gm if "gm" in inspect.signature(updater).parameters else graph)  # torch 2.13
    LOWER.run(graph, Context("layers"))
    assert call not in graph.nodes
    return found, graph, mode


def memory(graph):
    """The first node of which each node shares the memory."""
    first, values = {}, {node: node.meta["val"] for node in graph.nodes if node.op != "output"}
    return {node.name: first.setdefault(value.untyped_storage()._cdata, node.name) for node, value in values.items()}


def test_views_follow_what_was_replaced_and_products_stay():
    with values_computed_once():
        ours, graph, mode = lowered(post_grad.FakeTensorUpdater)
    before = {node: node.meta.get("val") for node in graph.nodes}
    assert any(map(is_computed, before)) and memory(graph)["view_default"] == "view_default"
    for _ in range(2):
        with V.set_fake_mode(mode):
            ours.incremental_update()
        assert all(node.meta["val"] is before[node] for node in before if is_computed(node))
    torchs, other, mode = lowered(post_grad.FakeTensorUpdater)
    with V.set_fake_mode(mode):
        torchs.incremental_update()
    assert memory(graph) == memory(other) and memory(graph)["view_default"] != "view_default"


def test_other_arguments_are_looked_at_again():
    with values_computed_once():
        _, graph, _ = lowered(post_grad.FakeTensorUpdater)
    node = next(node for node in graph.nodes if is_computed(node))
    node.args = (next(iter(graph.nodes)), *node.args[1:])
    assert not is_computed(node)


def test_nothing_is_replaced_outside():
    with values_computed_once():
        assert post_grad.FakeTensorUpdater.__module__ != "torch._inductor.fx_utils"
    assert post_grad.FakeTensorUpdater.__module__ == "torch._inductor.fx_utils"
