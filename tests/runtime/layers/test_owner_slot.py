"""Which calls of a module that owns layers decide on padding, and what they leave behind. No model runs."""

import types

import pytest
import torch
from torch import nn

from tests.support.batches import dropping, lengths_mask
from tunecompile.integrations.kernel_functions import BOUNDARIES
from tunecompile.runtime.layers import owner_slot
from tunecompile.runtime.layers.owner_slot import OwnerSlot
from tunecompile.runtime.step.mode import Mode
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.unpad import batches as module
from tunecompile.runtime.unpad.flat_batch import BOUNDS_BESIDE
from tunecompile.runtime.unpad.owner_call import OwnerCall, PastCall
from tunecompile.runtime.unpad.unpad import Unpadding


class Owner(nn.Module):
    def forward(self, x, use_cache=None):
        return x + 1


class Decides:
    """In the place of decisions on padding."""

    flat = True

    def __init__(self, recovery=None):
        self.owner, self.step = Owner(), Step(recovery=recovery)

    def call(self, args, kwargs):
        return "trained", args, kwargs

    def score(self, args, kwargs):
        return "scored", args, kwargs


class Evaluates:
    """In the place of an evaluation."""

    wanted = True

    def runs(self, args, kwargs):
        return self.wanted

    def call(self, args, kwargs):
        return "evaluated", args, kwargs


X = torch.zeros(1)


def test_calls_run_as_the_step_does():
    made, evaluation = Decides(), Evaluates()
    slot, scores = OwnerSlot(made, evaluation), {"use_cache": False}
    assert slot(X, **scores) == ("trained", (X,), scores) and made.step.mode is Mode.TRAIN and made.flat
    with torch.no_grad():
        assert slot(X, **scores) == ("scored", (X,), scores) and made.step.mode is Mode.SCORE
        assert slot(X, use_cache=True) == 1 and made.step.mode is Mode.EAGER and not made.flat, "it generates"
    made.owner.eval()
    assert slot(X) == 1, "its own"
    with torch.no_grad():
        assert slot(X) == ("evaluated", (X,), {}) and made.step.mode is Mode.EVALUATE
        evaluation.wanted = False
        assert slot(X) == 1 and made.step.mode is Mode.EAGER


def test_what_others_compile_is_read_by_nobody(monkeypatch):
    monkeypatch.setattr(owner_slot, "is_compiling", lambda: True)
    made = Decides()
    assert OwnerSlot(made, Evaluates())(X) == 1 and made.step.mode is Mode.EAGER and made.flat


def test_what_checkpoints_repeat_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(owner_slot, "in_backward", lambda: True)
    made = Decides()
    assert OwnerSlot(made, Evaluates())(X) == 1 and made.step.mode is Mode.TRAIN and made.flat


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
        made.flattened = 3
        assert made.score((X,), {"use_cache": False}) == "without padding"


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
