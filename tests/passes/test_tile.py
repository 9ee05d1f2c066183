"""Where the plan says so, an MLP and its backward make way for those in pieces, and only where nobody reads what only the whole one has."""

import operator

import pytest
import torch
from torch.fx import Graph

from tests.support.notes import has
from tests.support.passes.functions import mlp, mlp_weights
from tests.support.passes.run import assert_same, random, results
from tunecompile.compiler.backend import Backend
from tunecompile.ir.op import Provider
from tunecompile.ops import lora_mlp
from tunecompile.passes import PIPELINE
from tunecompile.passes.plan import tile
from tunecompile.planner.solver import KEEP, Plan

PLANS = [Plan(tiles=2), Plan(None, 2), Plan(frozenset({0}), 4)]


def ran(fn, args, plan, rows=()):
    """(how often each op was lowered, bytes saved), after a comparison with eager."""
    backend = Backend("test", PIPELINE, "eager", plan=plan)
    assert_same(*(sum(results(f, args, rows=rows), []) for f in (torch.compile(fn, backend=backend), fn)), tol=1e-5)
    assert not backend.failures
    context = backend.contexts[-1]
    return {name.partition(":")[0]: n for name, n in context.providers.items()}, sum(int(n) for _, n in context.saved)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.key)
def test_forward_and_backward_are_replaced(joined, plan):
    args = [random(2, 9, 8), *mlp_weights()]
    ops, saved = ran(mlp, args, plan)
    assert ops == {"lora_mlp_tiled": 1, "lora_mlp_tiled_backward": 1} and saved == 0
    torch._dynamo.reset()
    assert "lora_mlp" in ran(mlp, args, KEEP)[0]


def test_two_in_a_row(joined):
    ops, _ = ran(lambda x, *o: mlp(x + mlp(x, *o), *o), [random(2, 9, 8), *mlp_weights()], Plan(tiles=2))
    assert ops == {"lora_mlp_tiled": 2, "lora_mlp_tiled_backward": 2}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [(2, 9), (2, 3)])
def test_sizes_that_are_symbols(joined, tokens):
    assert "lora_mlp_tiled" in ran(mlp, [random(*tokens, 8), *mlp_weights()], Plan(tiles=4), rows=(0, 1))[0]


def test_variants_never_meet():
    plans = [KEEP, *PLANS, Plan(None), Plan(tiles=4), Plan(frozenset({0}))]
    assert len({plan.key for plan in plans}) == len(plans)


def test_a_precision_that_pieces_do_not_have_is_told(joined, monkeypatch):
    monkeypatch.setattr(
        lora_mlp,
        "providers",
        [*lora_mlp.providers, Provider("other", lambda *args: lora_mlp.reference(*args), lambda *args: None, "fp8")],
    )
    backend = Backend("test", PIPELINE, "eager", plan=Plan(tiles=2), precision="fp8")
    torch.compile(mlp, backend=backend)(random(2, 9, 8), *mlp_weights()).sum().backward()
    assert has(backend.contexts[-1], "not-in-precision", reason="tiled", subject="test", op="lora_mlp", precision="fp8")


@pytest.mark.parametrize("members, whole", [((0,), True), ((1,), False), ((0, 1), False), ((), False)])
def test_only_calls_of_which_the_first_result_alone_is_read(members, whole):
    graph = Graph()
    call = graph.call_function(torch.unbind, (graph.placeholder("x"),))
    made = [graph.call_function(operator.getitem, (call, place)) for place in members]
    assert tile._only_the_first(call) is (made[0] if whole else None)
    assert not members or tile._only_the_first(made[0]) is None


def test_a_reader_of_all_results_is_no_first_one():
    graph = Graph()
    call = graph.call_function(torch.unbind, (graph.placeholder("x"),))
    graph.call_function(torch.stack, (call, 0))
    assert tile._only_the_first(call) is None
