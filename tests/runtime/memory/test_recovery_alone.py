"""Which part is run again when a device is full, and what is said where none can be: budgets and layers are stand-ins."""

import types

import pytest
import torch
from torch import nn

from tests.support.memory.full_budgets import MEMORY, Budget, Repeated, failing, layer, recovery
from tests.support.notes import has
from tunecompile._torch.distributed import sharded
from tunecompile.errors import NothingFits, RankLost, StepLost
from tunecompile.notes import note
from tunecompile.runtime.memory import oom_recovery, recompute_call
from tunecompile.runtime.memory.oom_recovery import helps
from tunecompile.runtime.memory.rng_autocast import RngAutocastState


def test_without_a_budget_the_error_is_torchs_own():
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        recovery().attempt(failing(1))
    assert type(caught.value) is torch.OutOfMemoryError


def test_a_part_runs_again_under_a_smaller_plan():
    """For the bytes that were missing, then for as little as possible."""
    budget = Budget(0, smaller=2)
    found = recovery(budget, ranks=2)
    assert found.attempt(failing(2)) == "done"
    assert budget.retreats == [2048, None] and budget.released == budget.settled == 2
    assert budget.progress.steps == 9 and not budget.failed
    assert found.before is None and found.cause == "the step" and found.agreement.board.posted == [{"room": 77}] * 2
    (told,) = found.notes
    assert has([told], "ran-out-of-memory", subject="the step", before="2 layers") and "4 layers" in str(told)
    assert found.agreement.board.told == [found.in_words()]


def test_a_call_that_restarts_is_no_step_more():
    first, last = Budget(0), Budget(1)
    found = recovery(first, last)
    assert found.attempt(failing(1, index=1), restarts=True) == "done"
    assert (first.progress.steps, last.progress.steps) == (8, 8) and (first.retreats, last.retreats) == ([], [2048])
    assert "layers of cuda:1" in found.in_words() and not found.bare


def test_random_numbers_are_drawn_again():
    found = recovery(Budget(0))
    run, drawn = failing(1), []

    def draws():
        drawn.append(torch.rand(3))
        return run()

    found.attempt(draws)
    assert len(drawn) == 2 and torch.equal(*drawn)


def test_layers_keep_only_their_arguments_where_no_smaller_plan_helps():
    budget, seen = Budget(0, smaller=0), []
    found = recovery(budget)
    run = failing(1)
    found.attempt(lambda: (seen.append(found.bare), run())[1], restarts=True)
    assert seen == [False, True] and not found.bare
    with pytest.raises(NothingFits, match="is short of 0.00 MiB"):
        found.attempt(failing(9), restarts=True)
    assert not found.bare and found.before is None
    with pytest.raises(NothingFits):
        found.attempt(failing(1))


def test_tries_are_bounded(monkeypatch):
    assert 3 < oom_recovery.TRIES < 100
    monkeypatch.setattr(oom_recovery, "TRIES", 3)  # each looks for garbage in the whole process
    budget = Budget(0, smaller=10**6)
    with pytest.raises(NothingFits):
        recovery(budget).attempt(failing(10**6))
    assert len(budget.retreats) == 3


@pytest.mark.parametrize("error", [NothingFits, StepLost])
def test_what_gave_up_inside_is_not_tried_again(error):
    told = {"missing": "1", "plan": "a plan", "help": "", "reason": "wait"}
    calls = []

    def run():
        calls.append(1)
        raise error(**told)

    with pytest.raises(error):
        recovery(Budget(0)).attempt(run)
    assert len(calls) == 1


def test_the_device_that_is_full():
    first, last = Budget(0), Budget(1)
    found = recovery(first, last)
    named, other, unnamed = (torch.OutOfMemoryError(text) for text in (MEMORY.format(1), MEMORY.format(7), "full"))
    assert found.full(named) is last and found.full(other) is first and found.full(unnamed) is first
    found.running = last
    assert found.full(unnamed) is last and found.full(torch.OutOfMemoryError(MEMORY.format(0))) is first


def test_devices_of_the_layers():
    """Those that budgets are for; without any, all that layers are on."""
    cpu, first, last = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    slots = [types.SimpleNamespace(device=device) for device in (first, None, last, first)]
    assert recovery(slots=slots).devices() == [first, last]
    assert recovery(Budget(0), Budget(1), slots=slots).devices() == [cpu]


def test_a_step_that_others_would_have_to_repeat():
    budget = Budget(0)
    found = recovery(budget)
    found.bound = note("share-parameters")
    with pytest.raises(StepLost, match="0.00 MiB were missing"):
        found.attempt(failing(1))
    assert budget.retreats == [2048], "the next one has a smaller plan"
    found = recovery(Budget(0, smaller=2), ranks=2)
    found.gathers = True
    with pytest.raises(RankLost, match="Rank 0 of 2 ran out of memory.*5.00 MiB"):
        found.attempt(failing(1), restarts=True)
    assert found.attempt(failing(1)) == "done", "between the hooks of one layer nothing is sent"
    found.step.budgets[0].smaller = 0
    with pytest.raises(RankLost):
        found.attempt(failing(1))


@pytest.mark.parametrize("inside, of_slot", [(True, False), (False, True), (False, False)])
def test_what_is_gathered_part_by_part(inside, of_slot, monkeypatch):
    asked = []
    monkeypatch.setattr(oom_recovery, "gathers_inside", lambda model: asked.append(model) or inside)
    first, last = Budget(0), Budget(1)
    found = recovery(first, last, slots=[layer(), layer(of_slot)])
    found.begin()
    found.begin()
    assert found.gathers is (inside or of_slot) and asked == [first.memory.model], "asked once"
    assert found.bound is None


def test_a_step_that_was_lost_is_planned_anew():
    budget, other = Budget(0), Budget(1)
    found = recovery(budget, other)
    budget.failed, found.open = True, 1
    found.begin()
    assert (budget.retreats, other.retreats, found.open) == ([0], [], 0) and found.before
    assert found.agreement.board.posted == [{"room": 77}]
    budget.failed = True
    found.begin()
    assert budget.retreats == [0], "of other code: all layers' backwards were seen"


def test_other_ranks_plans_are_followed():
    budget = Budget(0)
    found = recovery(budget, ranks=4, news=[(3, 60), (2, 40)])
    found.begin()
    assert budget.gave == [60, 40] and found.cause == "rank 2" and "2 layers" in found.before
    calm = recovery(Budget(0), ranks=4, news=[(3, 60)])
    calm.begin()
    assert calm.before is None and calm.cause == "the step"


def test_parameters_of_several_processes():
    shared = nn.Parameter(torch.zeros(1))
    shared.ds_id = 1
    assert sharded(shared) and not sharded(nn.Parameter(torch.zeros(1)))
    for slots, bound in (([layer(), layer(parameter=shared)], True), ([layer(True, shared)], False)):
        found = recovery(Budget(0), slots=slots)
        found.begin()
        assert (found.bound is not None and found.bound.code == "share-parameters") is bound


def test_what_would_help_most():
    budget = Budget(0)
    assert "larger host_memory" in helps(budget, 150) and "0.00 MiB that layers hold" in helps(budget, 150)
    assert "about 80 tokens would fit, this one has 100" in helps(budget, 200)
    budget.memory.host_is_full = lambda nbytes: False
    assert "about 85 tokens" in helps(budget, 150) and "about 95 tokens" in helps(budget, 10)
    assert "fewer bytes beside the layers" in helps(budget, 1000) and "7.00 MiB" in helps(budget, 1000)
    budget.admitted = None
    assert "before its first layer" in helps(budget, 10)


def test_reasons_are_told_once():
    found = recovery(Budget(0))
    for place in range(2):
        found.refused[place] = note("have-hooks")
        found.watched = bool(place)
    told = found.report_notes()
    assert len(told) == 1 and has(told, "layers-not-repeated", reason="have-hooks")


def test_random_numbers_and_autocast_are_those_of_a_moment():
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        start = RngAutocastState.now(torch.device("cpu"))
        first = torch.rand(2)
    before = torch.get_rng_state()
    with torch.no_grad(), start.restored():
        assert torch.equal(torch.rand(2), first) and torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16
        assert not torch.is_autocast_cache_enabled()
    assert torch.equal(torch.get_rng_state(), before) and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("keeps", [True, False])
def test_a_backward_that_ran_out_of_memory_begins_with_its_forward(keeps, monkeypatch):
    """A part of its graph is used up, and the rest of it would take the room that the smaller plan made."""
    monkeypatch.setattr(recompute_call, "keeps_graph", lambda: keeps)
    found = recovery(Budget(0, smaller=2))
    found.open = 3
    call = Repeated(found, 2)
    assert recompute_call.RecomputeCall.backward(call, lambda: "given", "gradients") == "gradients"
    assert call.seen == ["the first graph", "graph 1", "graph 2"] and call.repeats == ["given"] * 2
    assert found.budgets[0].retreats == [2048, None] and found.open == 2, "then for as little as possible"
    assert found.budgets[0].progress.steps == 9, "the step did not begin again"
    assert call.edges == ("graph 2" if keeps else None)


@pytest.mark.parametrize("smaller, repeatable", [(0, True), (1, False)])
def test_a_backward_that_nothing_helps_gives_up(smaller, repeatable):
    found = recovery(Budget(0, smaller=smaller))
    call = Repeated(found, 9, repeatable)
    with pytest.raises(NothingFits):
        recompute_call.RecomputeCall.backward(call, lambda: "given", "gradients")
    assert len(call.seen) <= 3
