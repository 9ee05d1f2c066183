"""Layers are surveyed while they are compiled: nothing runs twice, and nothing is traced twice."""

import torch
from torch import nn

import tunecompile

LAYERS = 3


class Layer(nn.Module):
    """Counts its calls in a buffer, hands out a loss, draws random numbers, and may print, which breaks its graph."""

    def __init__(self, broken):
        super().__init__()
        self.up, self.down, self.broken = nn.Linear(32, 256), nn.Linear(256, 32), broken
        self.register_buffer("calls", torch.zeros(()))
        self.losses = []

    def forward(self, x):
        self.calls += 1
        if self.broken:
            print("called")
        inner = torch.sigmoid(self.up(x)) * torch.tanh(self.up(x))
        self.losses.append(inner.square().mean())
        return x + nn.functional.dropout(self.down(inner), 0.5)


class Model(nn.Module):
    def __init__(self, broken):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(broken) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + sum(layer.losses.pop() for layer in self.layers)


def build(memory, broken=False):
    return tunecompile.optimize(Model(broken).train(), memory=memory, executor="eager")


def step(model, rows=8):
    torch.manual_seed(3)
    loss = model(torch.randn(rows, 16, 32))
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), *grads, torch.get_rng_state()


def test_nothing_runs_twice(capsys):
    reference, model = step(build(None, broken=True)), build("1KiB", broken=True)
    for number in (1, 2):
        capsys.readouterr()
        assert all(map(torch.equal, step(model), reference))
        assert capsys.readouterr().out.count("called") == LAYERS
        assert [layer.calls.item() for layer in model.layers] == [number] * LAYERS
        assert not any(layer.losses for layer in model.layers)
    budget = model._tunecompile.step.budget
    assert len(budget.options) == LAYERS and all(found.whole for found in budget.surveys.candidates.values())
    assert any(plan["recompute"] for plan in tunecompile.report(model).memory["plans"])


def test_a_budget_takes_no_further_trace():
    def traced(memory):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build(memory)
        step(model)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], model

    (without, _), (within, model) = traced(None), traced("1TiB")
    assert without == within
    (region,) = model._tunecompile.regions
    assert len(region.backends) == 1 and len(region.variants) == 1 and tunecompile.report(model).compiles == 1


def test_a_call_that_is_not_trained_is_traced_once():
    model = build("1TiB")
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    for _ in range(2):
        torch.manual_seed(3)
        model(torch.randn(8, 16, 32)).backward()
    budget = model._tunecompile.step.budget
    assert len(budget.surveys.called) == 2 and len(budget.options) == LAYERS
