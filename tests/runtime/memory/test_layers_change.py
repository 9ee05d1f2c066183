"""Layers that do something else from some step on, under a tight budget: as without one, and refused where they cannot be repeated."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.support.compare import assert_equal
from tests.support.memory.budgets import LAYERS
from tests.support.memory.full_device import Block, gradients, ids, recovery
from tests.support.notes import has
from tunecompile.errors import LayerChanged

pytestmark = pytest.mark.filterwarnings("ignore")


class Changing(Block):
    """Does what a block does, and from the step on that sets `begun` one thing more."""

    begun, losses = False, []

    def forward(self, x, seen=None):
        return super().forward(x)


class HandingOut(Changing):
    def forward(self, x, seen):
        y = super().forward(x)
        if self.begun:
            self.losses.append(y.square().mean())
        return y


class WritingToCount(Changing):
    def forward(self, x, seen):
        y = super().forward(x)
        if self.begun:
            seen.add_(y.mean())
        return y


class WritingToInput(Changing):
    def forward(self, x, seen):
        return super().forward(x.mul_(2) if self.begun else x)


class Stack(nn.Module):
    """Uses each layer's input again behind it."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(32, 16), nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, rows):
        x, seen = self.embed(ids(rows)), torch.ones(16)
        total = 0.0
        for layer in self.layers:
            x = x * 1.0
            y = layer(x, seen)
            x = x + y
            total = total + x.square().mean()
        return total + seen.sum()


def of(kind, memory):
    return tunecompile.optimize(Stack(kind).train(), memory=memory, executor="eager")


def tight(kind):
    """Under a budget of which layers need more than half."""
    whole = of(kind, "1TiB")
    run(whole)
    return of(kind, int(1.2 * tunecompile.report(whole).memory["predicted_peak"]))


def run(model, rows=4):
    torch.manual_seed(3)
    Changing.losses = []
    found = model(rows)
    found = found + sum(Changing.losses)
    assert len(Changing.losses) in (0, LAYERS)
    found.backward()
    return found.detach(), gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, reason",
    [
        (HandingOut, "expose-tensors"),
        (WritingToCount, "write-in-place"),
        (WritingToInput, "write-in-place"),
    ],
)
def test_what_a_layer_begins_to_do_is_done_as_without_a_budget(kind, reason):
    model, reference = tight(kind), of(kind, None)
    for begun in (False, False, True, True):
        for layer in (*model.layers, *reference.layers):
            layer.begun = begun
        assert_equal(run(model), run(reference))
    assert len(recovery(model).refused) == LAYERS and has(model, "layers-not-repeated", reason=reason)


class Scaled(Block):
    """Computes with a weight that the model makes of the layer's own parameter."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.ones(16))

    def forward(self, x, seen):
        return super().forward(x) * self.made


class Outside(Stack):
    def forward(self, rows):
        for layer in self.layers:
            layer.made = layer.raw.exp()
        return super().forward(rows) + sum(layer.made.sum() for layer in self.layers)


def test_weights_that_are_computed_outside_of_a_layers_own_parameters():
    def made(memory):
        return tunecompile.optimize(Outside(Scaled).train(), memory=memory, executor="eager")

    whole, reference = made("1TiB"), made(None)
    run(whole)
    model = made(int(1.2 * tunecompile.report(whole).memory["predicted_peak"]))
    for _ in range(3):
        assert_equal(run(model), run(reference))
    assert len(recovery(model).refused) == LAYERS and has(model, "layers-not-repeated", reason="outside-tensors")


class WithScale(Changing):
    scale, activation = 1.5, staticmethod(torch.tanh)

    def forward(self, x, seen):
        return self.activation(super().forward(x)) * self.scale


@pytest.mark.parametrize(
    "what", ["scale", *(pytest.param(what, marks=pytest.mark.slow) for what in ("activation", None))]
)
def test_a_layer_that_changed_since_its_forward_is_not_recomputed(what):
    """Its gradients would be another function's."""
    model = tight(WithScale)
    expected = run(model)
    torch.manual_seed(3)
    found = model(4)
    recovery(model).make_room(0, 1, model._tunecompile.step.budget)
    if what is None:
        found.backward()
        assert_equal((found.detach(), gradients(model)), expected)
        return
    for layer in model.layers:
        setattr(layer, what, {"scale": 0.5, "activation": torch.sigmoid}[what])
    with pytest.raises(LayerChanged, match="a number that it computes with"):
        found.backward()
