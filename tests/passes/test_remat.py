"""What is read of buffers that a forward mutates, and which results are small beside their call's."""

import importlib
from operator import getitem

import torch
from torch.fx import Graph

remat = importlib.import_module("tunecompile.passes.plan.remat")  # the package has the pass by that name
aten = torch.ops.aten


def test_what_a_forward_computes_of_a_buffer_that_it_mutates():
    """Through views; not the mutation itself, and nothing of the backward."""
    graph = Graph()
    buffer = graph.placeholder("buffer")
    view = graph.call_function(aten.view.default, (buffer, [-1]))
    first, second = (graph.call_function(aten.sin.default, (source,)) for source in (view, buffer))
    graph.call_function(aten.copy_.default, (buffer, second))
    behind = [graph.call_function(aten.cos.default, (source,)) for source in (view, buffer)]
    graph.output((first, buffer))
    assert set(remat._readers(buffer, set(behind))) == {first, second}
    assert remat._readers(graph.call_function(aten.cos.default, (first,)), set()) == []


def test_a_result_that_is_small_beside_the_others():
    graph = Graph()
    call = graph.call_function(aten.native_layer_norm.default, (graph.placeholder("x"),))
    call.meta["val"] = (torch.empty(1000), torch.empty(1), torch.empty(900), torch.empty(0))
    small = []
    for place, made in enumerate(call.meta["val"]):
        member = graph.call_function(getitem, (call, place))
        member.meta["val"] = made
        small.append(remat._is_small(member))
    assert small == [False, True, False, False]
    call.meta["val"] = torch.empty(1000, 4)
    assert not remat._is_small(member)
