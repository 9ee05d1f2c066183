"""Which nodes mutate a tensor, and which no match may cross."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from tunecompile.ir.nodes import first_of, is_barrier, is_disturbed, is_mutation, node_arg, outputs_read

add_, add = torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor


def called(target, *args, **kwargs):
    """A call of x and these arguments."""
    graph = Graph()
    call = graph.call_method if isinstance(target, str) else graph.call_function
    return call(target, (graph.placeholder("x"), *args), kwargs)


MUTATIONS = {
    "a method": ("add_", (1,), {}),
    "an item": ("__setitem__", (0, 1), {}),
    "an operator": (operator.iadd, (1,), {}),
    "an operator's name": ("__iadd__", (1,), {}),
    "a function": (torch.sin_, (), {}),
    "out": (torch.add, (1,), {"out": 3}),
    "in place by name": (F.relu, (), {"inplace": True}),
    "in place by position": (F.silu, (True,), {}),
    "in place, last of many": (F.dropout, (0.5, True, True), {}),
    "torch's operator": (add_, (1,), {}),
}
OTHERS = {
    "a method": ("add", (1,), {}),
    "a method between underscores": ("__add__", (1,), {}),
    "an operator": (operator.add, (1,), {}),
    "a function": (torch.sin, (), {}),
    "not in place": (F.silu, (False,), {}),
    "not in place by name": (F.relu, (), {"inplace": False}),
    "another argument is true": (F.dropout, (0.5, True), {}),
    "a number in its place": (F.silu, (1,), {}),
    "a private function": (operator.__add__, (1,), {}),
    "torch's operator": (add, (1,), {}),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_mutates(name):
    target, args, kwargs = MUTATIONS[name]
    node = called(target, *args, **kwargs)
    assert is_mutation(node) and is_barrier(node)


@pytest.mark.parametrize("name", OTHERS)
def test_what_mutates_nothing(name):
    target, args, kwargs = OTHERS[name]
    node = called(target, *args, **kwargs)
    assert not is_mutation(node) and not is_barrier(node)


def test_inputs_weights_and_results_mutate_nothing():
    graph = Graph()
    x = graph.placeholder("x_")
    nodes = [x, graph.get_attr("weight_"), graph.call_module("layer_", (x,)), graph.output(x)]
    assert not any(map(is_mutation, nodes)) and not any(map(is_barrier, nodes))


def test_changes_of_modes_are_barriers():
    for name in ("_set_grad_enabled", "_enter_autocast", "_exit_autocast"):
        change = next(getattr(at, name) for at in (torch._C, torch.amp.autocast_mode) if hasattr(at, name))
        node = Graph().call_function(change, (False,))
        assert is_barrier(node) and not is_mutation(node)
    assert not is_barrier(Graph().call_method("_set_grad_enabled", (False,)))


def test_an_argument_that_is_a_node():
    node = called(torch.add, 2)
    assert node_arg(node, 0) is node.args[0] and node_arg(node, 1) is None and node_arg(node, 2) is None


@pytest.mark.parametrize(
    "target, args, value, disturbs, whole",
    [
        ("add_", (1,), torch.ones(2), True, True),
        ("add_", (1,), torch.ones(2, dtype=torch.cfloat), True, True),
        ("add_", (1,), torch.ones(2, dtype=torch.int64), True, False),
        ("fill_", (True,), torch.ones(2, dtype=torch.bool), True, False),
        ("add_", (1,), None, True, True),
        ("add", (1,), torch.ones(2), False, False),
        (torch._C._set_grad_enabled, (), torch.ones(2, dtype=torch.int64), True, True),
    ],
)
def test_what_may_not_be_computed_later(target, args, value, disturbs, whole):
    """Neither end counts; whole numbers do not where nothing reads them."""
    node = called(target, *args)
    graph, (x,) = node.graph, node.all_input_nodes
    x.meta["example_value"] = value
    last = graph.call_function(torch.sin, (x,))
    end = graph.call_method("mul_", (last, 2))
    assert is_disturbed(x, last) == disturbs and is_disturbed(x, last, whole_numbers=False) == whole
    assert not is_disturbed(last, end) and not is_disturbed(node, last) and not is_disturbed(last, last)
    assert is_disturbed(x, end) == disturbs
    assert first_of(graph, {end, last}) is last and first_of(graph, [node, x]) is x


def test_what_is_written_by_name_counts():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2, dtype=torch.int64)
    graph.call_function(torch.add, (x, x), {"out": graph.placeholder("y")})
    assert is_disturbed(x, graph.call_function(torch.sin, (x,)), whole_numbers=False)


def test_which_results_of_a_call_are_read():
    """A result that is taken out of it and left alone is not, and what reads the whole takes none out."""
    graph = Graph()
    call = graph.call_function(torch.topk, (graph.placeholder("x"), 2))
    call.meta["val"] = (1, 2, 3)
    second, _ = (graph.call_function(operator.getitem, (call, place)) for place in (1, 2))
    assert outputs_read(call) == (False, False, False)
    whole = graph.call_function(len, (call, 0))
    graph.output((second, whole))
    assert outputs_read(call) == (False, True, False)
