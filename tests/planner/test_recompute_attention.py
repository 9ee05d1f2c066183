"""Attention without dropout is recomputed: the same bits for fewer saved bytes; with dropout never."""

from operator import getitem

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_equal
from tests.support.memory.budgets import step
from tunecompile.cli.compare.meters import count_saved_bytes
from tunecompile.planner import candidates
from tunecompile.planner.recompute_attention import is_recomputable, recompute_in_backward

pytest.importorskip("transformers")
pytest.importorskip("peft")
LAYERS = 16  # enough for what each holds to count more than what one needs


def deep(memory, **config):
    return tunecompile.optimize(
        zoo.adapt(zoo.make("llama", num_hidden_layers=LAYERS, **config)).train(), memory=memory, executor="eager"
    )


def follows(model):
    """What the first layers recompute; the last one may need less."""
    return tuple(tunecompile.report(model).memory["plans"][0]["recompute"])


def saved_bytes(model):
    return count_saved_bytes(model, lambda: model(**zoo.batch()).loss)


@pytest.mark.slow
def test_the_same_bits_for_fewer_bytes(monkeypatch):
    model = deep("1KiB")
    reference = step(deep(None))
    assert_equal(step(model), reference)
    assert follows(model) == ("everything", "attention")
    monkeypatch.setattr(candidates, "is_recomputable", lambda node: False)
    without = deep("1KiB")
    assert_equal(step(without), reference)
    assert follows(without) == ("everything",)
    assert saved_bytes(model) < 0.85 * saved_bytes(without)


def test_which_calls_are_recomputable():
    q = torch.randn(1, 2, 8, 16)
    graph = make_fx(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))(q).graph
    assert len([node for node in graph.nodes if is_recomputable(node)]) == 1
    assert not any(map(is_recomputable, make_fx(lambda q: (q @ q.mT).softmax(-1))(q).graph.nodes))


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward_and_backward(returns_it: bool) -> tuple[Graph, Graph]:
    """The graphs of attention on q, of k times 2 and of v: results, and what the backward reads."""
    forward, backward = Graph(), Graph()
    q, k, v = (forward.placeholder(name) for name in "qkv")
    wide = forward.call_function(torch.mul, (k, 2))
    call = forward.call_function(ATTENTION, (q, wide, v, 0.0, True))
    out, sums = (forward.call_function(getitem, (call, place)) for place in (0, 1))
    result = forward.call_function(torch.mul, (out, 3))
    forward.output((out if returns_it else result, q, wide, v, out, sums))
    given = {node.name: backward.placeholder(node.name) for node in (q, wide, v, out, sums)}
    grad = backward.call_function(torch.mul, (backward.placeholder("tangent"), 3))
    inputs = [given[node.name] for node in (q, wide, v, out, sums)]
    made = backward.call_function(BACKWARD, (grad, *inputs, 0.0, True))
    backward.output(tuple(backward.call_function(getitem, (made, place)) for place in range(3)))
    for node in (call, given[out.name]):
        node.meta["val"] = None
    return forward, backward


def run_both(graphs: tuple[Graph, Graph], inputs: list[torch.Tensor], tangent: torch.Tensor) -> tuple:
    forward, backward = (GraphModule({}, graph) for graph in graphs)
    result, *saved = forward(*inputs)
    return result, *backward(*saved, tangent)


@pytest.mark.parametrize("returns_it", [False, True])
def test_attention_moves_into_the_backward_graph(returns_it):
    """Unless its output is a result as well."""
    torch.manual_seed(0)
    *inputs, tangent = (torch.randn(1, 2, 8, 16) for _ in range(4))
    graphs = forward_and_backward(returns_it)
    expected = run_both(graphs, inputs, tangent)
    assert recompute_in_backward(*graphs, 1) == (not returns_it)
    saved = graphs[0].output_node().args[0]
    assert len(saved) == (6 if returns_it else 5)
    assert sum(node.target is ATTENTION for node in graphs[1].nodes) == (not returns_it)
    assert all(map(torch.equal, run_both(graphs, inputs, tangent), expected))


def of_itself(backward: Graph, out: Node) -> Node:
    return out


def of_a_reader(backward: Graph, out: Node) -> Node:
    """Of what is computed of it."""
    return backward.call_function(torch.mul, (out, 2))


def of_nothing(backward: Graph, out: Node) -> None:
    """What the forward was given, the backward does not have."""


@pytest.mark.parametrize("other", [of_itself, of_a_reader, of_nothing])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_attention_is_not_recomputed_of_what_is_not_there(other, place):
    """The call would read what it is to make."""
    forward, backward = forward_and_backward(False)
    (reader,) = (node for node in backward.nodes if node.target is BACKWARD)
    with backward.inserting_before(reader):
        reader.args = (*reader.args[:place], other(backward, reader.args[4]), *reader.args[place + 1 :])
    before = str(backward)
    assert recompute_in_backward(forward, backward, 1) == 0 and str(backward) == before
    assert len(forward.output_node().args[0]) == 6


@pytest.mark.parametrize("masked", [False, True])
def test_what_the_call_reads_is_made_before_the_first_reader_of_its_output(masked):
    """A product reads the output, of which attention's backward reads a view, before the backward makes k of two calls.
    Scale and mask have no place among the arguments, only names."""
    torch.manual_seed(0)
    inputs, tangent, mask = [torch.randn(1, 2, 8, 16) for _ in range(3)], torch.randn(1, 2, 8, 16), torch.randn(8, 8)
    forward, backward = graphs = forward_and_backward(False)
    (call,) = (node for node in forward.nodes if node.target is ATTENTION)
    (reader,) = (node for node in backward.nodes if node.target is BACKWARD)
    given = {node.name: node for node in backward.nodes if node.op == "placeholder"}
    (out,) = (node for node in given.values() if node is reader.args[4])
    with backward.inserting_before(next(node for node in backward.nodes if node.op != "placeholder")):
        early = backward.call_function(torch.mul, (out, 5))
    with backward.inserting_before(reader):
        k = backward.call_function(torch.neg, (backward.call_function(torch.neg, (reader.args[2],)),))
        seen = backward.call_function(torch.ops.aten.view.default, (out, [1, 2, 8, 16]))
    causal = not masked
    reader.args = (*reader.args[:2], k, reader.args[3], seen, reader.args[5], 0.0, causal)
    call.args, call.kwargs = (*call.args[:4], causal), {"scale": 0.3}
    reader.kwargs = {"scale": 0.3}
    backward.output_node().args = ((*backward.output_node().args[0], early),)
    if masked:
        for graph, user in zip(graphs, (call, reader)):
            with graph.inserting_before(next(iter(graph.nodes))):
                user.kwargs = {"attn_mask": graph.placeholder("mask"), "scale": 0.3}
    results = forward.output_node()
    results.meta["desc"] = [str(value) for value in results.args[0]]

    def run():
        first, last = (GraphModule({}, graph) for graph in graphs)
        result, *saved = first(*([mask] if masked else []), *inputs)
        return result, *last(*([mask] if masked else []), *saved, tangent)

    expected = run()
    assert recompute_in_backward(*graphs, 1) == 1
    backward.lint()
    assert all(map(torch.equal, run(), expected))
    assert results.meta["desc"] == [str(value) for value in results.args[0]] and len(results.args[0]) == 5
    assert out not in backward.nodes and early.all_input_nodes[0].target is getitem


def test_a_mask_that_the_backward_does_not_have():
    forward, backward = forward_and_backward(False)
    (call,) = (node for node in forward.nodes if node.target is ATTENTION)
    with forward.inserting_before(next(iter(forward.nodes))):
        call.kwargs = {"attn_mask": forward.placeholder("mask")}
    before = str(backward)
    assert recompute_in_backward(forward, backward, 1) == 0 and str(backward) == before


def test_attention_without_a_backward_of_its_own_is_saved():
    """Of what others make of the output nothing tells q, k and v. A number among what is saved is no attention."""
    forward, backward = forward_and_backward(False)
    (reader,) = (node for node in backward.nodes if node.target is BACKWARD)
    reader.replace_all_uses_with(backward.find_nodes(op="placeholder")[0])
    backward.erase_node(reader)
    forward.output_node().args = ((*forward.output_node().args[0], 8),)
    assert recompute_in_backward(forward, backward, 1) == 0 and len(forward.output_node().args[0]) == 7


def test_attention_that_draws_random_numbers_and_other_calls_are_not_recomputable():
    graph = Graph()
    x = graph.placeholder("q")
    names = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward", "mm")
    calls = {
        rate: graph.call_function(getattr(torch.ops.aten, names[0]).default, (x, x, x, rate)) for rate in (0.0, 0.1)
    }
    assert [rate for rate, call in calls.items() if is_recomputable(call)] == [0.0]
    assert is_recomputable(graph.call_function(getattr(torch.ops.aten, names[0]).default, (x, x, x))), "by default"
    sums = (8, 8, 0.0, False, x, x)
    other = graph.call_function(getattr(torch.ops.aten, names[1]).default, (x, x, x, x, x, x, None, None, *sums))
    assert not is_recomputable(other) and not is_recomputable(x)


def test_the_sums_of_attention_are_never_made_again():
    """Whatever a backward reads them as: the call's first result would take their place."""
    forward, backward = forward_and_backward(False)
    (reader,) = (node for node in backward.nodes if node.target is BACKWARD)
    out, sums = reader.args[4:6]
    reader.args = (*reader.args[:4], sums, out, *reader.args[6:])
    assert recompute_in_backward(forward, backward, 1) == 0 and len(forward.output_node().args[0]) == 6
