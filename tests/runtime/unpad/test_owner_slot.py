"""Which calls of a module that owns layers decide on padding, and what they leave behind. No model runs."""

import types

import pytest
import torch
from torch import nn

from tests.support.batches import dropping, lengths_mask
from tunecompile.integrations.kernel_functions import BOUNDARIES
from tunecompile.runtime.step import Step
from tunecompile.runtime.unpad import owner_slot
from tunecompile.runtime.unpad import unpad as module
from tunecompile.runtime.unpad.flat_batch import BOUNDS_BESIDE
from tunecompile.runtime.unpad.owner_call import OwnerCall, PastCall
from tunecompile.runtime.unpad.owner_slot import OwnerSlot
from tunecompile.runtime.unpad.unpad import Unpadding


class Owner(nn.Module):
    def forward(self, x, use_cache=None):
        return x + 1


class Decides:
    """In the place of decisions on padding."""

    def __init__(self, recovery=None):
        self.owner, self.step = Owner(), types.SimpleNamespace(recovery=recovery, makes_cache=False)

    def call(self, args, kwargs):
        return "trained", args, kwargs

    def score(self, args, kwargs):
        return "scored", args, kwargs


class Evaluates:
    """In the place of an evaluation."""

    def call(self, args, kwargs):
        return "evaluated", args, kwargs


X = torch.zeros(1)


def test_steps_and_scores_decide():
    made = Decides()
    slot = OwnerSlot(made, Evaluates())
    assert slot(X, use_cache=False) == ("trained", (X,), {"use_cache": False})
    with torch.no_grad():
        assert slot(X) == ("scored", (X,), {})
    made.owner.eval()
    assert slot(X) == 1, "its own"
    with torch.no_grad():
        made.step.evaluates = True  # the last call did
        assert slot(X) == ("evaluated", (X,), {}) and not made.step.evaluates


@pytest.mark.parametrize("why", ["others_trace", "in_backward"])
def test_what_others_trace_and_checkpoints_repeat_runs_as_it_is(why, monkeypatch):
    monkeypatch.setattr(owner_slot, why, lambda: True)
    assert OwnerSlot(Decides(), Evaluates())(X) == 1


def test_a_step_that_may_run_out_of_memory_can_begin_again():
    seen = []

    def attempt(run, restarts):
        seen.append(restarts)
        return run(), run()

    made = Decides(types.SimpleNamespace(attempt=attempt))
    assert OwnerSlot(made, Evaluates())(X) == (("trained", (X,), {}),) * 2 and seen == [True]


def unpadding(**step):
    return Unpadding(Owner(), tuple, Step(**step))


def test_a_forward_whose_padding_nobody_removed_is_its_own(monkeypatch):
    """Before any step, scores keep their padding, and what was left out before says nothing of them."""
    made = unpadding()
    made.flat = True
    monkeypatch.setattr(made, "_run", lambda *_: "without padding")
    with torch.no_grad():
        assert made.score((X,), {"use_cache": False}) == 1 and made.flat is False
        made.flattened, made.flat = 3, True
        assert made.score((X,), {"use_cache": True}) == 1 and made.flat is False, "it generates"


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_made_once_more_is_no_step(fails, monkeypatch):
    """Its hooks are called again, and must not begin another."""
    made, hidden, seen = unpadding(), torch.ones(2, 3, 4), []

    def run(call, args, kwargs):
        seen.append((made.step.repeats, call.given, torch.is_autocast_enabled("cpu")))
        if fails:
            raise ValueError("planted")
        return (hidden * 2,)

    monkeypatch.setattr(made, "_run", run)
    made.readable = [PastCall.of((X,), {}, (hidden,), dropping(3, 2, length=3))]
    if fails:
        with pytest.raises(ValueError):
            made.logits_are_read(hidden, torch.bfloat16)
    else:
        read = made.logits_are_read(hidden, torch.bfloat16)
        assert torch.equal(read, torch.where(lengths_mask(3, 2, length=3).bool()[..., None], hidden, hidden * 2))
    assert seen == [(True, {"x": X}, True)] and not made.step.repeats
    assert not made.readable and made.logits_are_read(hidden, None) is None


@pytest.mark.parametrize("why", [None, "in_backward", "in_checkpoint", "no gradients", "no call", "given", "unread"])
def test_bounds_that_the_model_kept_from_its_layers(why, monkeypatch):
    """Layers that know documents are told of them, but where they may run again, without this call."""
    made, layer, bounds = unpadding(), nn.Linear(1, 1), torch.tensor([0, 3])
    monkeypatch.setattr(module, "knows_documents", lambda each: each is layer and why != "unread")
    if why in ("in_backward", "in_checkpoint"):
        monkeypatch.setattr(module, why, lambda: True)
    made.running = call = OwnerCall({BOUNDARIES: bounds} if why == "given" else {}, beside={BOUNDARIES: bounds})
    if why == "no call":
        made.running = None
    with torch.set_grad_enabled(why != "no gradients"):
        found = made.with_bounds(layer, {"a": 1})
    assert found == ({"a": 1, BOUNDS_BESIDE: bounds} if why is None else {"a": 1}) and call.packs is (why is None)
