"""Layers that a budget may not compute again: which they are, that they run as they did, and what is said where one has to be all the same."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_equal
from tests.support.memory.budgets import LAYERS
from tests.support.memory.full_device import (
    Block,
    Full,
    Tiny,
    build,
    gradients,
    graphs,
    guarded,
    ids,
    loss,
    peak,
    plain,
    recovery,
    step,
)
from tests.support.notes import has
from tunecompile.errors import LayerChanged, NoSecondDerivative, StepLost

pytestmark = pytest.mark.filterwarnings("ignore")


def test_what_cannot_be_repeated_runs_as_it_did():
    model, reference = guarded(), build(None)
    outside = [torch.ones(16, requires_grad=True) for _ in range(2)]
    for m, tensor in zip((model, reference), outside):
        layer = m.backbone.layers[1]
        layer.up.weight.register_hook(lambda grad: 2 * grad)
    for seed in range(2):
        assert_equal(step(model, seed), step(reference, seed))
    assert has(model, "layers-not-repeated"), tunecompile.report(model)


def test_sharded_layers_are_not_repeated(monkeypatch):
    model = guarded()
    monkeypatch.setattr(recovery(model), "_bound", lambda: "are shared")
    full, before = Full(model, 1, "forward"), peak(model)
    with pytest.raises(StepLost, match="its layers are shared. Skip this step"):
        step(model)
    assert_equal(step(model), plain())
    assert full.raised == 1 and peak(model) < before


def test_second_derivatives_are_refused():
    model = guarded()
    with pytest.raises(NoSecondDerivative):
        loss(model).backward(create_graph=True)


def test_weights_that_changed_in_between_are_refused():
    model = guarded()
    found = loss(model)
    recovery(model).make_room(0, 1, model._tunecompile.step.budget)
    with torch.no_grad():
        model.backbone.layers[2].up.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


class Doubling(Block):
    """Writes to what it is given."""

    def forward(self, x, scale=None):
        return super().forward(x.mul_(2))


def doubling(memory):
    torch.manual_seed(0)
    model = Tiny()
    model.backbone.layers = nn.ModuleList(Doubling() for _ in range(LAYERS))
    return tunecompile.optimize(model.train(), memory=memory, executor="eager")


def test_layers_that_write_are_not_repeated():
    def run(model):
        torch.manual_seed(3)
        x = model.backbone.embed(ids())
        for layer in model.backbone.layers:
            x = layer(x)
        found = x.square().mean()
        found.backward()
        return x.detach(), gradients(model)

    whole, reference = doubling("1TiB"), doubling(None)
    step(whole)
    model = doubling(int(1.2 * tunecompile.report(whole).memory["predicted_peak"]))  # tight
    for m in (model, reference):
        loss(m)
    assert_equal(run(model), run(reference))
    assert not graphs(model) and has(model, "layers-not-repeated", reason="write-in-place")


# -- weights that are others in the meantime --------------------------------------------------------------------------------------


def called_with(model, weights):
    """Two losses of one model with other weights."""
    torch.manual_seed(5)
    return sum(torch.func.functional_call(model, weights, (ids(seed=seed), ids(seed=seed))) for seed in (1, 2))


@pytest.mark.parametrize("detached", [False, True])
def test_weights_of_a_functional_call(detached):
    """Those that are made of others have a graph of their own, which both losses go through."""

    def run(model):
        weights = {name: 1.5 * p for name, p in model.named_parameters()}
        if not detached:
            called_with(model, weights).backward()
            return gradients(model)
        weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        found = called_with(model, weights)
        found.backward(retain_graph=True)
        found.backward()
        assert all(p.grad is None for p in model.parameters())
        return {name: weight.grad for name, weight in weights.items()}

    model, reference = guarded(), build(None)
    assert not recovery(model).refused
    for _ in range(2):
        ours, theirs = run(model), run(reference)
        assert set(ours) == set(theirs) and max(zoo.errors(ours, theirs).values()) < 1e-6
    assert_equal(step(model), plain())


def test_layers_that_changed_in_between_are_refused():
    model = guarded()
    found = loss(model)
    recovery(model).make_room(0, 1, model._tunecompile.step.budget)
    model.eval()
    with pytest.raises(
        LayerChanged,
        match="between training and evaluation",
    ):
        found.backward()
