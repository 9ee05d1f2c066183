"""Layers that are not what they were in their forward, under a tight budget: refused where they cannot be repeated."""

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


def tight(make):
    """Under a budget of which layers need more than half."""
    whole = tunecompile.optimize(make().train(), memory="1TiB", executor="eager")
    run(whole)
    memory = int(1.2 * tunecompile.report(whole).memory["predicted_peak"])
    return tunecompile.optimize(make().train(), memory=memory, executor="eager")


def run(model, rows=4):
    torch.manual_seed(3)
    found = model(rows)
    found.backward()
    return found.detach(), gradients(model)


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
    model = tight(lambda: Outside(Scaled))
    reference = tunecompile.optimize(Outside(Scaled).train(), executor="eager")
    for _ in range(3):
        assert_equal(run(model), run(reference))
    assert len(recovery(model).refused) == LAYERS and has(model, "layers-not-repeated", reason="outside-tensors")


class WithScale(Block):
    scale = 1.5

    def forward(self, x, seen):
        return super().forward(x) * self.scale


def test_a_layer_that_changed_since_its_forward_is_not_recomputed():
    """Its gradients would be another function's."""
    model = tight(lambda: Stack(WithScale))
    run(model)
    torch.manual_seed(3)
    found = model(4)
    recovery(model).make_room(0, 1, model._tunecompile.step.budget)
    for layer in model.layers:
        layer.scale = 0.5
    with pytest.raises(LayerChanged, match="a number that it computes with"):
        found.backward()
