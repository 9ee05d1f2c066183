"""Heads whose weights an engine gathers: for the loss, where it comes in time."""

import pytest
import torch
from torch import nn

from tests.support.heads import WIDTH, WORDS, head_of, linear, states
from tunecompile.runtime.loss_head import slot as slot_module
from tunecompile.runtime.loss_head.deferred import LazyTensor
from tunecompile.runtime.loss_head.slot import HeadSlot
from tunecompile.runtime.step.mode import Mode
from tunecompile.runtime.step.state import Step


class Engine:
    """Gathers a head's weight for the loss. It runs the head's own code where that cannot wait."""

    gathers_for_loss, refused, engine = True, None, "an engine"

    def __init__(self, other_hooks=False):
        self.other_hooks = other_hooks

    def has_other_hooks(self):
        return self.other_hooks

    def product_dtype(self, hidden):
        return hidden.dtype


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("why", ["model-without-loss", "head-no-linear", "head-with-other-hooks", None])
def test_a_weight_that_is_gathered_for_the_loss(why, monkeypatch):
    """Later, if the loss comes before the model's forward ends. Else the head is called, and it is said why."""
    monkeypatch.setattr(slot_module, "labels_are_given", lambda: why != "model-without-loss")
    module = Doubled(WIDTH, WORDS, dtype=torch.float64) if why == "head-no-linear" else linear()
    slot = HeadSlot(Step(mode=Mode.TRAIN), head_of(module))
    slot.placed, slot.placement, hidden = True, Engine(why == "head-with-other-hooks"), states()
    found, waits = slot(hidden), why is None
    assert isinstance(found, LazyTensor) is (slot.head.gathered is slot.placement) is waits
    assert waits or torch.equal(found, module(hidden))
    assert [reason.code for reason in slot.head.tally.refused] == ["head-eager"] * (not waits)
    assert waits or (reason := slot.head.tally.refused[0].detail).code == "head-gathered" and reason.detail.code == why
