"""Adapters over what is no linear: the experts of a mixture and their router, which PEFT parametrises at every call."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.notes import has

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def wrappers(model):
    return [module for module in model.modules() if hasattr(type(module), "_activate_lora")]


def test_layers_are_compiled_once_and_for_all_steps():
    reference = zoo.adapt(zoo.make("mixtral"))
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    compiles = []
    for seed in range(3):
        _, expected = zoo.step(reference, zoo.batch(seed=seed))
        _, got = zoo.step(model, zoo.batch(seed=seed))
        assert max(zoo.errors(got, expected).values()) < 1e-5
        compiles.append(tunecompile.report(model).compiles)
    assert compiles[0] == compiles[1] == compiles[2] <= 5, tunecompile.report(model)
    assert has(model, "parametrizing-modules")


def test_they_are_given_back_and_a_copy_has_its_own():
    model = tunecompile.optimize(zoo.adapt(zoo.make("mixtral")), executor="eager")
    inner = [module for module in wrappers(model) if "forward" in vars(module)]
    assert inner and all(module.forward.args[1] is module for module in inner)
    other = copy.deepcopy(model)
    assert all(module.forward.args[1] is module for module in wrappers(other) if "forward" in vars(module))
    tunecompile.restore(model)
    assert not any("forward" in vars(module) for module in wrappers(model))


@pytest.mark.slow
def test_a_forward_of_somebody_elses_is_left_alone():
    model = zoo.adapt(zoo.make("mixtral"))
    gate = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp.gate"))
    own, called = gate.forward, []
    gate.forward = lambda *args, **kwargs: (called.append(1), own(*args, **kwargs))[1]
    replaced = gate.forward
    tunecompile.optimize(model, executor="eager")
    zoo.step(model, zoo.batch())
    tunecompile.restore(model)
    assert called and gate.forward is replaced


def test_verified_in_double_precision():
    """For which torch has no grouped product."""
    result = tunecompile.verify(tunecompile.optimize(zoo.adapt(zoo.make("mixtral")), executor="eager"), zoo.batch())
    assert result.passed and result.reference == "float64", str(result)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0] + self.linear(h)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_attention_whose_weights_are_replaced_at_every_call():
    """The report says what runs eagerly; no error of a compiler stands there."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["attention", "linear"], init_lora_weights=False)
    reference = peft.get_peft_model(Stack(), config).train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for length in (5, 6, 7):
        grads = []
        for m in (model, reference):
            m.zero_grad()
            m(torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length))).square().mean().backward()
            grads.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
        assert grads[1] and max(zoo.errors(*grads).values()) < 1e-5
    report = tunecompile.report(model)
    assert has(report, "merging-modules", count=2, subject="MultiheadAttention") and not has(report, "not-compiled"), (
        report
    )
    assert report.compiles <= 4 and not has(report, "compiled-without-rewrites"), report
