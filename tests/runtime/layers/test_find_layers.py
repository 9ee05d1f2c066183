"""Which containers hold repeated layers."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tunecompile.runtime.layers.find_layers import find_layers, find_norms


class ByName(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.layers = nn.ModuleDict({name: zoo.Layer() for name in names})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("names, count", [("012", 3), ("37", 2), (["text", "image"], 0), (["0", "last"], 0)])
def test_a_dictionary_of_layers_by_number(names, count):
    found = find_layers(ByName(names))
    assert [len(stack.members) for stack in found] == ([count] if count else [])


def test_norms_outside_the_layers():
    """Modules with vectors and nothing else, whatever their class."""
    owner = ByName("01")
    assert find_norms(owner) == []
    owner.embedded, owner.head, owner.without_bias = nn.Embedding(4, 8), nn.Linear(8, 4), nn.Linear(8, 4, bias=False)
    owner.rotary, owner.drop = nn.Identity(), nn.Dropout()
    owner.norm, owner.last = nn.RMSNorm(8), nn.LayerNorm(8)
    assert find_norms(owner) == [owner.norm, owner.last]


def test_such_layers_are_compiled_once():
    model = ByName("012").train()
    reference = copy.deepcopy(model)
    tunecompile.optimize(model, executor="eager")
    x = torch.randn(2, 8)
    for each in (model, reference):
        each(x).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    (region,) = tunecompile.report(model).regions
    assert (region.layers, region.compiles) == (3, 1)
