"""What plans may recompute: the operations of a joint graph that they name."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile.ops.dora import adapted_norm
from tunecompile.ops.lora import lora_linear
from tunecompile.planner import candidates
from tunecompile.planner.candidates import (
    CandidateCost,
    backward_nodes,
    candidate_stages,
    describe,
    expensive_nodes,
    is_random,
    options,
    plans,
    survey,
    tiled_plans,
)
from tunecompile.planner.cost_model import SUSTAINED, Work
from tunecompile.planner.hardware import Rates
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan, PlanOption


def test_what_draws_random_numbers_is_no_product_to_recompute():
    """Attention's kernels do, whose generator a second run would not find where it was."""
    traced = make_fx(lambda x, w: F.scaled_dot_product_attention(*[(x @ w)[None, None]] * 3), tracing_mode="fake")
    graph = traced(torch.ones(4, 8), torch.ones(8, 8)).graph
    assert [node.target for node in expensive_nodes(graph)] == [torch.ops.aten.mm.default]
    attention = [node for node in graph.nodes if "attention" in str(node.target)]
    assert len(attention) == 1 and is_random(attention[0])
    assert not any(is_random(node) for node in graph.nodes if node is not attention[0])


def test_what_an_option_costs():
    """At twice the tokens. Products take 10 ms, and a copy of 10 bytes one: what no work hides is waited for."""
    product, rates = Work(products=int(1000 * SUSTAINED)), Rates(flops=100.0, copy=10.0)
    keep = CandidateCost(KEEP, 400, 200, 50, 60, product, product + product)
    again = CandidateCost(RECOMPUTE, 40, 0, 50, 300, product, product + product + product)
    plain = [
        PlanOption(KEEP, 800, 100, 120, 0.0, work=60.0),
        PlanOption(RECOMPUTE, 80, 100, 600, 20.0, work=80.0),
    ]
    offloaded = [
        PlanOption(KEEP, 0, 100, 120, 60 + 40 + 1.6, 800, 60 + 101.6, 160 - 101.6),
        PlanOption(KEEP, 400, 100, 120, 20 + 0.8, 400, 60 + 20.8, 80 - 20.8),
        PlanOption(RECOMPUTE, 0, 100, 600, 20 + 0.16, 80, 80 + 0.16, 16 - 0.16),
    ]
    for offload, expected in ((False, plain), (True, [plain[0], *offloaded[:2], plain[1], offloaded[2]])):
        found = options([again, keep][::-1], 2.0, rates, offload)
        assert [option.plan for option in found] == [option.plan for option in expected]
        for option, exact in zip(found, expected, strict=True):
            values = [dataclasses.astuple(each)[1:] for each in (option, exact)]
            assert values[0] == pytest.approx(values[1]), option


def test_what_depends_on_a_tangent_is_backward():
    traced = make_fx(lambda primals, tangents: (primals.sin(), tangents * primals.cos()))(torch.ones(2), torch.ones(2))
    for node, name in zip(traced.graph.nodes, ("primals_1", "tangents_1")):
        node.name = name
    found = backward_nodes(traced.graph)
    assert {node.op if node.op == "placeholder" else node.target for node in found if node.op != "output"} == {
        "placeholder",
        torch.ops.aten.mul.Tensor,
    }


def products():
    """The graph of the largest product, which frees least for its time, of the one that frees most, and of one between;
    and a vector."""

    def fn(x, wide, narrow, long, large, vector):
        return long @ large, (x @ wide) @ narrow, (long @ vector).sin()

    shapes = ((8, 4), (4, 32), (32, 2), (8, 64), (64, 33), (64,))
    return make_fx(fn, tracing_mode="fake")(*map(torch.ones, shapes)).graph


def named(count, *orders):
    """Plans that recompute the first of these, none to all."""
    found = [Plan(frozenset(order[:n])) for n in range(count + 1) for order in orders]
    return list(dict.fromkeys(found))


def test_plans_add_what_frees_most_a_second_and_what_is_largest():
    graph = products()
    assert [describe(node) for node in expensive_nodes(graph)] == ["mm 8x33", "mm 8x32", "mm 8x2"]
    found = plans(graph)
    assert found == [*named(3, (1, 2, 0), (0, 1, 2)), RECOMPUTE] and len(found) == 7
    assert tiled_plans(graph, 4) == []
    assert list(candidate_stages(graph)) == [[KEEP], found[1:]]


def test_plans_in_tiles_come_late_and_recomputed_attention_last(monkeypatch):
    graph = products()
    *others, last = expensive_nodes(graph)
    monkeypatch.setattr(candidates, "has_tiled_form", lambda node: node is last)
    tiled = [[Plan(frozenset(each), tiles) for each in ((), (1,), (1, 0))] + [Plan(None, tiles)] for tiles in (4, 16)]
    assert tiled_plans(graph, 4) == tiled[0]
    assert list(candidate_stages(graph))[2:] == tiled
    monkeypatch.setattr(candidates, "is_recomputable", lambda node: node is others[0])
    assert list(candidate_stages(graph))[2:] == [
        *tiled,
        [Plan(None, attention=True), Plan(None, 4, attention=True), Plan(None, 16, attention=True)],
    ]


def returning(*sizes):
    """A graph that returns results of so many elements."""
    made = make_fx(lambda x: [x[: int(size)] * 2 for size in sizes], tracing_mode="fake")(torch.ones(64))
    return made


def test_norms_of_weights_are_no_products_to_recompute():
    """They are a vector: to free it is next to nothing."""
    graph = torch.fx.Graph()
    given = [graph.placeholder(name) for name in ("weight", "a", "b")]
    for node, shape in zip(given, ((8, 4), (2, 4), (8, 2))):
        node.meta["val"] = torch.empty(shape)
    norm = graph.call_function(adapted_norm.overload, (*given, 1.0, torch.float32))
    product = graph.call_function(torch.ops.aten.mm.default, (given[2], given[1]))
    pairs = graph.call_function(lora_linear.overload, ())
    for node, value in ((norm, torch.empty(8)), (product, torch.empty(8, 4)), (pairs, (torch.empty(8), None))):
        node.meta["val"] = value
    assert expensive_nodes(graph) == [product, pairs]


def test_what_is_read_off_two_lowered_graphs():
    """What the forward returns is held; beside it are what it needs while it runs, and what the backward needs."""

    def graphs(plan):
        seen.append(plan)
        halves = (lambda x, w: ((x @ w).sin(), x[:1] * 2)), (lambda g, w: (g @ w.T).sum())
        return [make_fx(fn, tracing_mode="fake")(torch.ones(8, 64), torch.ones(64, 64)) for fn in halves]

    seen = []
    rows = survey(graphs, [KEEP, RECOMPUTE])
    assert [row.plan for row in rows] == seen == [KEEP, RECOMPUTE]
    (row, _), tensor = rows, 8 * 64 * 4
    assert survey(lambda plan: [returning(64, 32), returning(1)], [KEEP])[0].largest == 256, "twice the next"
    assert survey(lambda plan: [returning(64, 33), returning(1)], [KEEP])[0].largest == 0
    bare = [survey(lambda plan, made=made: [made, returning(1)], [KEEP])[0] for made in (returning(), returning(4 / 4))]
    assert [(row.returned, row.largest) for row in bare] == [(0, 0), (4, 4)]
    assert (row.returned, row.largest, row.forward) == (tensor + 256, tensor, tensor - 256)
    assert row.backward == tensor + 4 and row.forward_work.products == row.backward_work.products == 2 * 8 * 64 * 64
