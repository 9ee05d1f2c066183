"""Who looks at hidden states, and whose weights are gathered: small modules, and no model runs."""

import types

import pytest
import torch
from torch import nn

from tests.support.batches import dropping, lengths_mask
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.unpad import refusals
from tunecompile.runtime.unpad.owner_call import PastCall
from tunecompile.runtime.unpad.unpad import Unpadding


class Owner(nn.Module):
    """A table and two layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(4, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x):
        return x


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Modules of tests are as those of transformers."""
    refusals._is_known.cache_clear()
    monkeypatch.setattr(refusals, "_KNOWN_HOMES", (*refusals._KNOWN_HOMES, "tests."))
    yield
    refusals._is_known.cache_clear()


@pytest.mark.parametrize("where", ["embed", "layers.1"])
def test_a_hook_is_found_wherever_it_is(where):
    """It would see zeros at padding. Once it is gone, nobody does."""
    owner = Owner()
    watch = refusals.OwnerWatch(owner, lambda: tuple(owner.layers))
    assert watch.reason() is None
    handle = owner.get_submodule(where).register_forward_hook(lambda module, args, output: None)
    assert watch.reason() is None, "in one call of the owner it is asked once"
    watch.begin()
    assert watch.reason().code == "hook-on-module"
    handle.remove()
    watch.begin()
    assert watch.reason() is None


def test_code_of_other_packages_is_found_wherever_it_is():
    """It may read neighbouring tokens, or keep its inputs."""
    elsewhere = types.FunctionType((lambda self, x=None: x).__code__, {"__name__": "elsewhere"})
    for place in ("embed", "layers.1"):
        owner = Owner()
        watch = refusals.OwnerWatch(owner, lambda owner=owner: tuple(owner.layers))
        module, kind = owner.get_submodule(place), type(owner.get_submodule(place))
        module.forward = elsewhere
        assert watch.reason().code == "unknown-module"
        del module.forward
        watch.begin()
        assert watch.reason() is None
        module.__class__ = type("Foreign", (kind,), {"forward": elsewhere})
        if place != "embed":  # what runs in layers is in their graphs
            watch.snapshot = None
        watch.begin()
        assert watch.reason().code == "unknown-module"


@pytest.mark.parametrize("name", ["ds_id", "_fsdp_flattened"])
def test_weights_that_are_gathered_from_other_ranks(name, monkeypatch):
    """All of them have to call such modules equally often."""
    owner = Owner()
    setattr(owner.layers[1].weight, name, 1)
    assert not refusals.gathers(owner), "alone"
    monkeypatch.setattr(refusals, "several", lambda: True)
    monkeypatch.setattr(refusals, "gathers_inside", lambda owner: False)
    assert refusals.gathers(owner) and not refusals.gathers(Owner())
    monkeypatch.setattr(refusals, "gathers_inside", lambda owner: True)
    assert refusals.gathers(Owner())


def test_hidden_states_with_padding_are_of_a_step_that_is_repeated():
    """The model runs once more, and what counts steps does not count this one."""
    made, ran, whole = Unpadding(Owner(), tuple, Step()), [], torch.ones(2, 6, 3)
    made._run = lambda call, args, kwargs: ran.append((made.step.repeats, call.given)) or (whole,)
    hidden = torch.zeros(2, 6, 3)
    assert made.logits_are_read(hidden, None) is None and not ran, "of no call that is known"
    made.readable, made.flattened = [PastCall.of((5,), {}, hidden, dropping(6, 4, length=6))], 1
    made.flat, real = True, lengths_mask(6, 4).bool()[..., None]
    assert torch.equal(made.logits_are_read(hidden, None), torch.where(real, hidden, whole))
    assert ran == [(True, {"x": 5})] and not made.step.repeats and not made.readable
    assert not made.flat and made.refused.code == "logits-read", "later batches keep their padding"


def test_convolutions_before_the_layers_see_what_they_always_saw():
    """Those behind, and other modules wherever they are, would see rows that padding is missing from."""
    layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1))])
    owner = nn.ModuleDict(
        {"first": nn.Conv1d(2, 2, 1), "embed": nn.Linear(2, 2), "layers": layers, "last": nn.Conv1d(2, 2, 1)}
    )
    found = [*refusals._outside(owner, [*layers])]
    assert {id(module) for module in found} == {id(m) for m in (owner, owner["embed"], layers, owner["last"])}
