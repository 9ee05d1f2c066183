"""Small copies of graphs: what each box says."""

from operator import getitem

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule

from tunecompile.compiler.graph_snapshot import replacements, snapshot
from tunecompile.ops import rms_norm


def layer():
    """The graph of a norm, of a linear that is split, and of attention's flag and size."""
    graph = Graph()

    def add(node, made):
        node.meta["example_value"] = made
        return node

    x = add(graph.placeholder("L_args_0_"), torch.empty(2, 3, 4, dtype=torch.bfloat16))
    weight = add(graph.placeholder("L_layer_modules_norm_parameters_weight_"), torch.empty(4))
    width = add(graph.placeholder("s0"), 3)
    normed = add(graph.call_function(rms_norm.overload, (x, weight, 1e-6)), torch.empty(2, 3, 4))
    size = add(graph.call_method("size", (normed, 1)), 3)
    halves = add(graph.call_method("split", (normed, 2, -1)), (torch.empty(2, 3, 2), torch.empty(2, 3, 2)))
    parts = [add(graph.call_function(getitem, (halves, place)), torch.empty(2, 3, 2)) for place in range(2)]
    row = add(graph.call_function(getitem, (parts[0], 0)), torch.empty(3, 2))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    add(graph.get_attr("table"), torch.empty(4))
    look = graph.call_function(print, (row,))
    scores = add(graph.call_function(F.scaled_dot_product_attention, (row, parts[1], parts[1])), torch.empty(()))
    scores.meta["missed"], parts[1].meta["missed"] = "a mask", "no half"
    scores.meta["nn_module_stack"] = {"": ("L['layer'].self_attn", torch.nn.Module)}
    scores.meta["stack_trace"] = '  File "/home/me/mine.py", line 7, in forward\n    attention(q)\n'
    graph.output((scores, size, width))
    return graph, {"normed": normed, "halves": halves, "parts": parts, "row": row, "look": look}


def test_boxes_of_a_graph():
    graph, nodes = layer()
    made = snapshot(graph, {nodes["halves"].name: {"b", "a"}, nodes["parts"][0].name: {"c"}})
    given, normed, halves, row, look, scores, result = made.boxes
    assert (given.label, given.kind, given.shape, given.dtype) == ("input 0", "input", "2×3×4", "bfloat16")
    assert (normed.label, normed.kind, normed.weights) == ("rms_norm", "op", ("norm.weight 4",))
    assert (halves.label, halves.kind, halves.shape, halves.dtype) == ("split", "call", "2×3×2", "float32")
    assert halves.gives == ("a", "b", "c") and halves.missed == "no half" and halves.inputs == (normed.name,)
    assert (row.label, row.inputs, row.shape) == ("slice", (halves.name,), "3×2")
    assert (scores.label, scores.inputs, scores.shape) == ("attention", (row.name, halves.name), "1")
    assert (scores.module, scores.line, scores.code) == ("self_attn", "mine.py:7", "attention(q)")
    assert scores.missed == "a mask" and not row.missed and not row.line and not row.module
    assert (result.label, result.kind, result.inputs, result.shape) == ("result", "result", (scores.name,), "1")
    assert (look.label, look.kind, look.inputs, look.shape) == ("print", "call", (row.name,), "")
    assert made.calls == 5
    assert [box[0] for box in made.outline] == [box.name for box in made.boxes]


def test_a_graph_without_results():
    graph = Graph()
    graph.output(())
    (result,) = snapshot(graph).boxes
    assert (result.kind, result.shape, result.dtype, result.inputs) == ("result", "", "", ())


def test_what_new_nodes_took_the_place_of():
    """Through nodes that took it before them, too."""
    graph = Graph()
    x = graph.placeholder("x")
    old = graph.call_function(torch.sin, (x,))
    graph.output(old)
    gm = GraphModule({}, graph)
    with replacements(gm) as took:
        for target in (torch.cos, torch.tan):
            last = graph.output_node().args[0]
            with graph.inserting_before(graph.output_node()):
                new = graph.call_function(target, (x,))
            last.replace_all_uses_with(new)
    assert took == {"cos": {"sin"}, "tan": {"sin"}}
