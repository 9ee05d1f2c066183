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


@pytest.mark.slow
def test_other_lengths():
    model, reference = deep("1KiB"), deep(None)
    for length in (24, 17, 24):
        assert_equal(step(model, length=length), step(reference, length=length))
    assert follows(model) == ("everything", "attention")


@pytest.mark.slow
def test_dropout_in_attention_is_never_drawn_twice():
    model, reference = deep("1KiB", attention_dropout=0.3), deep(None, attention_dropout=0.3)
    assert_equal(step(model), step(reference))
    assert "attention" not in follows(model)


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
