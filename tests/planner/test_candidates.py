"""What plans may recompute: the operations of a joint graph that they name."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile.planner.candidates import CandidateCost, backward_nodes, expensive_nodes, is_random, options
from tunecompile.planner.cost_model import SUSTAINED, Work
from tunecompile.planner.hardware import Rates
from tunecompile.planner.solver import KEEP, RECOMPUTE, PlanOption


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
