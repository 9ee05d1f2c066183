"""Graphs that run op by op draw random numbers as code does: a seed gives the same ones again."""

import pytest
import torch
import torch.nn.attention.flex_attention
from torch._inductor import inductor_prims
from torch.fx import Graph, GraphModule

from tunecompile._torch.background.op_by_op import draws_numbers, run_op_by_op, why_not_op_by_op


def graph_of(target, *args) -> GraphModule:
    graph = Graph()
    graph.output((graph.call_function(target, tuple(graph.placeholder("seed") if a == "seed" else a for a in args)),))
    return GraphModule({}, graph)


RANDOM, RANDINT = inductor_prims.random, inductor_prims.randint


@pytest.mark.parametrize(
    "gm",
    [
        graph_of(RANDOM, [64], "seed", "rand"),
        graph_of(RANDOM, [64], "seed", "randn"),
        graph_of(RANDINT, 0, 99, [64], "seed"),
    ],
    ids=["rand", "randn", "randint"],
)
def test_numbers_are_those_of_the_seed(gm):
    """Torch's own function draws others each time: a backward would recompute another mask than its forward had."""
    assert draws_numbers(gm)
    run = run_op_by_op(gm, lambda target: None)
    (one,), (same,), (other,) = (run([torch.tensor(seed, device="cpu")]) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_numbers_of_the_process_stay_as_they_are():
    before = torch.get_rng_state()
    run_op_by_op(graph_of(RANDOM, [64], "seed", "rand"), lambda target: None)([torch.tensor(3, device="cpu")])
    assert torch.equal(before, torch.get_rng_state())


def test_other_random_ops_are_told():
    """A version of torch may have more of them, whose seeds are not known here."""
    known = graph_of(RANDOM, [64], "seed", "rand")
    assert why_not_op_by_op(known) == ""
    other = graph_of(torch.ops.prims.normal.default, [4])
    assert why_not_op_by_op(other) == ""  # it draws of the process, as everywhere
    target = torch.library.Library("prims", "FRAGMENT")
    target.define("inductor_rand_of_tests(Tensor seed) -> Tensor")
    assert why_not_op_by_op(graph_of(torch.ops.prims.inductor_rand_of_tests.default, "seed"))


def test_operations_on_functions_are_told():
    assert "flex_attention" in why_not_op_by_op(graph_of(torch.ops.higher_order.flex_attention, "seed"))


def test_inputs_are_freed_as_they_are_used():
    """A backward holds all that its forward saved only until it has read it."""
    graph = Graph()
    given = graph.placeholder("given")
    graph.output((graph.call_function(torch.ops.aten.neg.default, (given,)),))
    inputs = [torch.ones(3, device="cpu")]
    run_op_by_op(GraphModule({}, graph), lambda target: None)(inputs)
    assert inputs == []


def test_a_call_has_something_else_in_its_place():
    graph = Graph()
    graph.output((graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("given"),)),))
    run = run_op_by_op(GraphModule({}, graph), {torch.ops.aten.neg.default: lambda given: given * 10}.get)
    assert run([torch.ones(1, device="cpu")])[0].item() == 10
