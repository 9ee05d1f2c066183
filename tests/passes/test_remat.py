"""What is read of buffers that a forward mutates, and which results are small beside their call's."""

import copy
from operator import getitem

import pytest
import torch
from torch import nn
from torch.fx import Graph

from tunecompile import optimize, report
from tunecompile._torch.autograd import CheckpointPolicy
from tunecompile.compiler.pass_manager import Context
from tunecompile.passes.plan import remat
from tunecompile.planner.solver import KEEP, RECOMPUTE

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


def valued(graph, target, *args, shape=(8, 8), dtype=torch.float32):
    node = graph.call_function(target, args)
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return node


def test_what_is_saved_and_what_is_made_again():
    """Products are saved unless they are chosen; beside a chosen one, what is cheap is made again, too."""
    graph, save, again = Graph(), CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
    x = graph.placeholder("x")
    product, other = (valued(graph, aten.mm.default, x, x) for _ in range(2))
    cheap, drawn = valued(graph, aten.sin.default, x), valued(graph, aten.bernoulli.default, x)
    assert [remat._policy(node, set()) for node in (product, cheap, drawn)] == [save, None, save]
    assert [remat._policy(node, {product}) for node in (product, cheap, drawn)] == [again, again, save]
    assert remat._policy(other, {product}) is save and remat._policy(drawn, {drawn}) is save


def test_of_random_numbers_the_mask_is_saved():
    """Its bytes are bools. Numbers that others read, too, are saved themselves, and a mask as large as they are is not."""
    save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE

    def policy(dtype=torch.bool, others=0, drawn=aten.rand.default, cut=aten.gt.Scalar):
        graph = Graph()
        numbers = valued(graph, drawn, [8, 8])
        mask = valued(graph, cut, numbers, 0.1, dtype=dtype)
        for _ in range(others):
            graph.call_function(aten.sin.default, (numbers,))
        return remat._policy(mask, {graph.call_function(aten.mm.default, ())})

    assert policy() is save
    assert policy(others=1) is again and policy(dtype=torch.float32) is again
    assert policy(drawn=aten.ones.default) is again and policy(cut=aten.sum.default) is again


def test_a_layer_that_recomputes_all_saves_masks():
    """Op by op: 4 bytes a number were saved. (Inductor saves a seed.)"""
    layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    model = nn.Sequential(nn.Sequential(layer, copy.deepcopy(layer))).train()
    optimize(model, executor="eager")
    model[0][1].gradient_checkpointing = True
    model(torch.randn(32, 16, requires_grad=True)).sum().backward()
    assert report(model).regions[0].saved_bytes[-1] == 32 * 16


def test_what_extends_a_value_that_is_made_again():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 8, device="meta")
    kept, made, small = (valued(graph, aten.mm.default, x, x, shape=shape) for shape in ((8, 8), (8, 8), (2, 2)))
    for node in (made, small):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    cases = {
        True: [(aten.sin.default, made), (aten.mul.Tensor, made, small), (aten.mul.Tensor, small, made)],
        False: [
            (aten.sin.default, kept),
            (aten.sin.default, x),
            (aten.mul.Tensor, made, kept),
            (aten.mul.Tensor, made, x),
            (aten.mm.default, made, made),
            (aten.mul.Tensor, small, kept),
        ],
    }
    for extends, calls in cases.items():
        for call in calls:
            assert remat._extends_recomputed(valued(graph, *call)) == extends, call
    assert not remat._extends_recomputed(valued(graph, aten.mul.Tensor, small, small))
    assert not remat._extends_recomputed(valued(graph, aten.sin.default, made, shape=(0,)))


def test_views_of_inputs_are_made_again():
    """So that the input is saved; not views of what is computed, nor of inputs that are written to."""
    graph = Graph()
    weight, changed = (graph.placeholder(name) for name in ("weight", "changed"))
    for node in (weight, changed):
        node.meta["val"] = torch.empty(8, 8, device="meta")
    views = [valued(graph, aten.t.default, weight)]
    views.append(valued(graph, aten.view.default, views[0], [64], shape=(64,)))
    sine = valued(graph, aten.sin.default, weight)
    others = [valued(graph, aten.t.default, of) for of in (sine, changed)]
    back = valued(graph, aten.t.default, weight)
    graph.output((sine,))
    assert remat._views_of_inputs(graph, {changed}, {back}) == views
    remat.run(graph, Context("layer", KEEP))
    assert all(node.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE for node in views)
    assert "recompute" not in others[0].meta


def test_a_mask_that_is_written_out_is_made_again():
    """From the bools that all layers share; not what is computed of bools of the layer's own, or written to."""
    graph, bools = Graph(), dict(dtype=torch.bool)
    mask, changed, x = (graph.placeholder(name) for name in ("mask", "changed", "x"))
    for node, dtype in ((mask, torch.bool), (changed, torch.bool), (x, torch.float32)):
        node.meta["val"] = torch.empty(8, 8, dtype=dtype, device="meta")
    zero, least = (valued(graph, aten.full.default, [], value, shape=()) for value in (0.0, -1e9))
    view = valued(graph, aten.view.default, mask, [1, 8, 8], shape=(1, 8, 8), **bools)
    own = valued(graph, aten.gt.Scalar, x, 0, **bools)
    made = [valued(graph, aten.where.self, place, zero, least) for place in (mask, view)]
    made.append(valued(graph, aten.constant_pad_nd.default, made[0], [0, 8], shape=(8, 16)))
    made.append(valued(graph, aten.expand.default, made[2], [2, 8, 16], shape=(2, 8, 16)))
    for place, *values in ((own, zero, least), (changed, zero, least), (mask, x, least), (mask, zero, x)):
        valued(graph, aten.where.self, place, *values)
    valued(graph, aten.add.Tensor, made[0], x)
    back = valued(graph, aten.where.self, mask, zero, least)
    graph.output((x,))
    assert remat._written_out(graph, {changed}, {back}) == made
    remat.run(graph, Context("layer", KEEP))
    assert all(node.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE for node in made)


@pytest.mark.parametrize("followed, policy", [(KEEP, "MUST_SAVE"), (RECOMPUTE, "MUST_RECOMPUTE")])
def test_the_forward_alone_has_tags(followed, policy):
    graph = Graph()
    x, tangents = graph.placeholder("x"), graph.placeholder("tangents_1")
    for node in (x, tangents):
        node.meta["val"] = torch.empty(8, 8, device="meta")
    ahead, back = valued(graph, aten.mm.default, x, x), valued(graph, aten.mm.default, tangents, x)
    further = valued(graph, aten.sin.default, back)
    graph.output((ahead, further))
    remat.run(graph, Context("layer", followed))
    assert ahead.meta["recompute"] is CheckpointPolicy[policy]
    assert not any("recompute" in node.meta for node in (x, tangents, back, further))
