"""Which layers are called again when a device is full, and which as they are: budgets and layers are stand-ins."""

import pytest
import torch

from tests.support.memory.full_budgets import Budget, Repeated, failing, recovery, slot_of
from tunecompile.errors import NothingFits, StepLost
from tunecompile.notes import note
from tunecompile.runtime.memory import oom_recovery, recompute_call
from tunecompile.runtime.memory.rng_autocast import RngAutocastState


def test_a_step_that_did_not_begin_has_nothing_to_say():
    budget = Budget(0)
    found = recovery(budget)
    assert found.report_notes() == [] and not found.bare
    budget.failed = True
    found.begin()
    assert budget.retreats == [], "of other code: no layer of a step is open"


def test_a_layer_that_is_gathered_is_repeated_by_itself():
    """Outside of its call nothing can be called again; others leave that to the whole forward."""
    for gathers in (True, False):
        budget = Budget(0)
        found = recovery(budget)
        slot = slot_of(budget, failing(1), gathers=gathers)
        found.refused[id(slot)] = note("have-hooks")
        if not gathers:
            with pytest.raises(torch.OutOfMemoryError):
                found.layer(slot, (), {})
        assert found.layer(slot, (), {}) == "done" and found.running is budget and found.open == 2
        assert budget.retreats == ([2048] if gathers else [])


@pytest.mark.parametrize(
    "change",
    [
        lambda budget, slot: setattr(budget, "tight", False),
        lambda budget, slot: setattr(slot, "watched", True),
        lambda budget, slot: setattr(slot, "budget", None),
    ],
    ids=["roomy", "watched", "without"],
)
def test_layers_that_are_called_as_they_are(change, monkeypatch):
    """There is room, a loss may use what a hook keeps, or no budget is given. Each counts until its backward is seen."""
    monkeypatch.setattr(oom_recovery, "RecomputeCall", None)
    budget = Budget(0)
    found, slot = recovery(budget), slot_of(budget, failing(0))
    change(budget, slot)
    assert found.layer(slot, (), {}) == "done" and found.open == 1 and found.watched is slot.watched


def test_a_layer_that_cannot_be_repeated_runs_once_more_as_it_is():
    """With the random numbers that it drew before, and from the next call on without a try."""
    budget, drawn = Budget(0), []
    found = recovery(budget)
    found.bound = note("share-parameters")
    slot = slot_of(budget, lambda: drawn.append(torch.rand(2)) or "done")
    assert found.layer(slot, (), {}) == "done" and found.open == 1 and len(drawn) == 1
    assert found.refused[id(slot)].code == "share-parameters"
    assert found.layer(slot, (), {}) == "done" and found.open == 2


def test_saved_tensors_that_others_count_are_not_saved_twice(monkeypatch):
    """Inside a checkpoint of the user's, torch's error is the user's."""
    monkeypatch.setattr(oom_recovery, "saving_is_taken", lambda: note("have-hooks"))
    budget = Budget(0)
    found = recovery(budget)
    with pytest.raises(torch.OutOfMemoryError):
        found.attempt(failing(1))
    assert found.layer(slot_of(budget, failing(0)), (), {}) == "done" and budget.retreats == []


def test_ranks_that_exchange_keys_cannot_repeat_a_part(monkeypatch):
    monkeypatch.setattr(oom_recovery, "is_shared", lambda: True)
    found = recovery(Budget(0))
    found.begin()
    assert found.bound.code == "exchange-keys"


@pytest.mark.parametrize("error", [NothingFits, StepLost])
def test_a_backward_does_not_repeat_what_gave_up_inside(error):
    found = recovery(Budget(0))
    call = Repeated(found, 0)

    def give_up(grads):
        raise error(missing="1", plan="a plan", help="", reason="wait")

    call._gradients = give_up
    with pytest.raises(error):
        recompute_call.RecomputeCall.backward(call, lambda: "given", "gradients")
    assert found.budgets[0].retreats == [] and call.edges == "the first graph"


def test_random_numbers_of_each_gpu_are_set_back(monkeypatch):
    there, seen = {torch.device("cuda", at): f"state {at}" for at in range(2)}, []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: seen.append((device, state)))
    monkeypatch.setattr(torch.cuda, "get_rng_state", there.__getitem__)
    start = RngAutocastState.now(*there, torch.device("cpu"))
    start.rewind()
    assert start.there == there and seen == list(there.items())
