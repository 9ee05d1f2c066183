"""What runs without compiled code, or is compiled again, is reported."""

import copy
import types
import warnings

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import optimized
from tests.support.notes import find, has

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


class Scaled(nn.Module):
    """Each layer has a loop of its own length, so that Dynamo compiles each anew."""

    def __init__(self, index: int):
        super().__init__()
        self.index, self.linear = index, nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(self.index + 1):
            x = x + self.linear(x) / (4 * self.index + 4)
        return x


class Deep(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Scaled(i) for i in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_reaching_dynamos_limit_is_reported():
    torch.manual_seed(0)
    model = Deep(torch._dynamo.config.recompile_limit + 3)
    reference = copy.deepcopy(model)
    optimized(model)
    x = torch.randn(2, 4, 8)
    for m in (model, reference):
        m(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert has(model, "ran-eagerly", reason="graph-limit"), tunecompile.report(model)


def test_layers_that_come_later_are_reported_and_optimized_the_next_time():
    model = tunecompile.optimize(zoo.make("llama", num_hidden_layers=2), executor="eager")
    model.model.layers.append(zoo.make("llama", num_hidden_layers=3).model.layers[2])
    model.config.num_hidden_layers = 3
    zoo.step(model, zoo.batch())
    assert has(model, "new-layers", count=1)
    tunecompile.optimize(tunecompile.restore(model), executor="eager")
    zoo.step(model, zoo.batch())
    assert not find(model, "new-layers") and tunecompile.report(model).regions[0].layers == 3


def test_layers_called_around_their_owner_are_reported():
    model = Deep(3)
    optimized(model)
    x = torch.randn(2, 4, 8)
    for layer in model.layers[1:]:  # the first one would begin a step
        x = layer(x)
    x.sum().backward()
    assert has(model, "ran-eagerly", reason="called-without-owner")


@pytest.mark.slow
def test_a_model_compiled_by_its_user():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = optimized(Deep(3))
        reference = copy.deepcopy(model)
        x = torch.randn(2, 4, 8)
        model(x).sum().backward()
        model.zero_grad()
        torch.compile(model, backend="aot_eager")(x).square().sum().backward()
        reference(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters()):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        assert has(model, "compiled-from-outside")


def test_modules_that_run_ligers_kernels_are_told_of():
    model = optimized(zoo.make("llama", num_hidden_layers=2))
    assert not find(model, "liger-kernels")
    norm = model.model.layers[0].input_layernorm
    names = {**type(norm).forward.__globals__, "__name__": "liger_kernel.transformers.rms_norm"}
    norm.forward = types.MethodType(types.FunctionType(type(norm).forward.__code__, names), norm)
    assert has(model, "liger-kernels", subject="LlamaRMSNorm")
