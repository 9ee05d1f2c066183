"""Layers that are called without their owner, and forwards that a backward pass repeats: gradients and masks are eager's."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tunecompile
from tests.support import zoo
from tests.support.notes import has

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 16


class Layer(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(rate)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Model(nn.Module):
    """Layers in a Sequential, and how they are called."""

    def __init__(self, run, rate=0.0, count=3):
        super().__init__()
        self.run, self.blocks = run, nn.Sequential(*(Layer(rate) for _ in range(count)))

    def forward(self, x):
        return self.run(self, x)


def in_a_loop(model, x, around=lambda block, x: block(x)):
    for block in model.blocks:
        x = around(block, x)
    return x


def checkpointed(reentrant):
    return functools.partial(in_a_loop, around=functools.partial(checkpoint, use_reentrant=reentrant))


def in_segments(model, x):
    return checkpoint_sequential(model.blocks, 2, x, use_reentrant=False)


def as_a_whole(model, x):
    return checkpoint(model.blocks, x, use_reentrant=True)


def by_forward(model, x):
    return model.blocks.forward(x)


WAYS = {
    "loop": in_a_loop,
    "checkpoints": checkpointed(False),
    "re-entrant checkpoints": checkpointed(True),
    "segments": in_segments,
    "one checkpoint": as_a_whole,
    "forward": by_forward,
    "call": lambda model, x: model.blocks(x),
}
EAGERLY = ("re-entrant checkpoints",)  #: no owner tells their first forward from one without gradients


def inputs(seed=0):
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_eagers(way):
    reference = Model(WAYS[way]).double().train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for seed in range(3):
        found = []
        for each in (model, reference):
            each.zero_grad()
            each(inputs(seed)).square().mean().backward()
            found.append({name: p.grad for name, p in each.named_parameters()})
        assert max(zoo.errors(*found).values()) < 1e-9
    assert (tunecompile.report(model).compiles > 0) == (way not in EAGERLY)


@pytest.mark.parametrize("way", WAYS)
def test_a_repetition_draws_the_same_masks(way):
    """What the last layer added, not counting what dropout left out, is the gradient of its bias."""
    model = tunecompile.optimize(Model(WAYS[way], rate=0.5, count=2).double().train(), executor="eager")
    last, kept = model.blocks[1], []
    last.linear.weight.data.zero_()
    last.linear.bias.data.fill_(0.1)
    for seed in range(3):
        model.zero_grad()
        kept.clear()
        handle = last.drop.register_forward_hook(lambda *args: kept.append((args[2] != 0).sum((0, 1))))
        out = model(inputs(seed))
        handle.remove()
        out.sum().backward()
        slope = 1 - torch.tanh(torch.tensor(0.1, dtype=torch.float64)) ** 2
        assert torch.allclose(last.linear.bias.grad, 2 * slope * kept[0])


class Embeds(nn.Module):
    """A model that embeds rows, by a call of what owns its layers, or by its `forward`."""

    def __init__(self, by_call):
        super().__init__()
        self.by_call, self.blocks = by_call, nn.Sequential(*(Layer(0.5) for _ in range(2)))

    def forward(self, x):
        return (self.blocks(x) if self.by_call else self.blocks.forward(x)).mean(1)


@pytest.mark.parametrize("by_call", [True, False])
def test_a_model_that_embeds_once_more_in_the_backward_pass(by_call):
    """As cached contrastive losses do: the second time with gradients, from the same state of the generator."""
    model = tunecompile.optimize(Embeds(by_call).double().train(), executor="eager")
    for seed in range(3):
        x = inputs(seed).detach()
        state = torch.random.get_rng_state()
        with torch.no_grad():
            first = model(x)
        leaf, again = first.clone().requires_grad_(), []

        def repeat(grad, x=x, state=state, again=again):
            torch.random.set_rng_state(state)
            with torch.enable_grad():
                again.append(model(x))
                (again[-1] * grad).sum().backward()

        leaf.register_hook(repeat)
        leaf.square().sum().backward()
        assert torch.equal(again[0], first)


class Lists(nn.Module):
    """Pairs of layers in a list, or stages of them, and how its owner goes through."""

    def __init__(self, members, run):
        super().__init__()
        self.layers, self.run = nn.ModuleList(members), run

    def forward(self, x):
        for each in self.layers:
            x = self.run(each, x)
        return x


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(5, 5, bias=False)

    def forward(self, x):
        return self.linear(self.norm(x).mT).mT


def of_pairs():
    return [nn.ModuleList([Mixes(), nn.LayerNorm(WIDTH), Layer(0.0)]) for _ in range(3)]


def of_stages():
    return [nn.ModuleList(Layer(0.0) for _ in range(2)) for _ in range(2)]


def through_all(stage, x):
    for layer in stage:
        x = layer(x)
    return x


@pytest.mark.parametrize("members, layers", [(of_pairs, 6), (of_stages, 4)])
def test_lists_in_a_list(members, layers):
    reference = Lists(members(), through_all).double().train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    found = []
    for each in (model, reference):
        each(inputs()).square().mean().backward()
        found.append({name: p.grad for name, p in each.named_parameters()})
    assert max(zoo.errors(*found).values()) < 1e-9
    report = tunecompile.report(model)
    assert sum(region.layers for region in report.regions) == layers
    assert all(region.compiles == 1 for region in report.regions)


def in_parts(layer, x):
    return x + layer.drop(torch.tanh(layer.linear(layer.norm(x))))


@pytest.mark.parametrize(
    "run", [lambda layer, x: layer.forward(x), lambda layer, x: type(layer).forward(layer, x), in_parts]
)
def test_layers_that_are_never_called_are_told_of(run, caplog):
    model = tunecompile.optimize(Lists([Layer(0.0) for _ in range(2)], run).double().train(), executor="eager")
    for _ in range(3):
        model(inputs()).sum().backward()
    assert len([each for each in caplog.messages if "called as a module" in each]) == 1
    report = tunecompile.report(model)
    assert has(report, "never-called", count=2) and "run one training step" not in str(report)
