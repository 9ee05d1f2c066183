"""Weights that hooks inside a layer give another memory for a call: gradients are those of what was multiplied."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.compare import assert_same_run
from tests.support.models.pairs import pair
from tunecompile.runtime.layers.replaced_weights import given_views_of_replaced

pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    """A frozen MLP with an adapter."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, 2 * width, bias=False)
        self.up.requires_grad_(False), self.down.requires_grad_(False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x) + self.b(self.a(x))))


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def around(module, before, after):
    """Hooks as of those who replace `forward`."""
    forward = module.forward

    def called(module, *args):
        before(module)
        out = forward(*args)
        after(module)
        return out

    module.forward = functools.update_wrapper(functools.partial(called, module), forward)


def cast(module):
    """Weights are stored in float8 (diffusers' `enable_layerwise_casting`)."""
    module.to(torch.float8_e4m3fn)
    around(module, lambda m: m.to(torch.float32), lambda m: m.to(torch.float8_e4m3fn))


def zeroed(module):
    """Weights are there for the call alone, as of those who leave them on the host."""
    weight, kept = module.weight, module.weight.data
    weight.data = torch.zeros_like(kept)

    @torch.compiler.disable
    def load(_):
        weight.data = kept.clone()

    @torch.compiler.disable
    def drop(_):
        weight.data = torch.zeros_like(kept)

    around(module, load, drop)


def step(model, seed):
    return model(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed))).square().mean()


@pytest.mark.parametrize("hook, trained", [(cast, False), (zeroed, False), (zeroed, True)])
def test_the_backward_reads_what_was_multiplied(hook, trained):
    def build():
        torch.manual_seed(0)
        model = Stack(Layer() for _ in range(3))
        return model.requires_grad_() if trained else model

    model, reference = pair(build)
    for layer in (*model.layers, *reference.layers):
        hook(layer.up), hook(layer.down)
    for seed in range(3):
        assert_same_run(model, reference, functools.partial(step, seed=seed))


@pytest.mark.parametrize("replaced", [False, True])
def test_the_first_call_decides(replaced):
    """Later ones are given the weights themselves, unless one of them was given another memory meanwhile."""
    weights = [nn.Parameter(torch.ones(2), requires_grad=trained) for trained in (True, False)]
    seen = []
    run = given_views_of_replaced(lambda *args: seen.append(args))
    for _ in range(3):
        run(seen, *weights)
        weights[1].data = weights[1].data.clone() if replaced else weights[1].data
    for number, (other, *given) in enumerate(seen):
        views = replaced or number == 0
        assert other is seen and [a is b for a, b in zip(given, weights)] == [not views] * 2
        assert [each.requires_grad for each in given] == [True, False]
