"""A forward pass that a hook of a backward pass begins is compiled: losses that cache gradients run each part so."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_close
from tests.support.notes import BROKEN, EAGER, find
from tunecompile._torch import autograd

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def step(model):
    """The embeddings' gradients are cached, and each part of the batch runs once more for its own."""
    parts = zoo.batch(rows=4, length=16)["input_ids"].split(2)

    def embed(ids):
        return model.model(input_ids=ids, use_cache=False).last_hidden_state.mean(1)

    with torch.no_grad():
        cached = [embed(ids).requires_grad_() for ids in parts]
    loss = torch.cat(cached).square().sum()
    gradients = torch.autograd.grad(loss, cached)
    start = loss.detach().requires_grad_()

    def again(grad):
        with torch.enable_grad():
            for ids, each in zip(parts, gradients):
                torch.dot(embed(ids).flatten(), each.flatten()).backward()

    model.zero_grad(set_to_none=True)
    end = start.clone()
    end.register_hook(again)
    end.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_eager_by_compiled_layers():
    model = zoo.adapt(zoo.make("llama")).base_model.model
    model.train()
    expected = step(model)
    tunecompile.optimize(model, executor="eager")
    for _ in range(2):
        assert_close(step(model), expected)
    report = tunecompile.report(model)
    assert {match.family: match.rewritten for match in report.matches}["lora"], report
    assert not find(report, *EAGER, *BROKEN), report.notes


def test_who_begins_and_who_repeats():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(("function", autograd.in_backward(), autograd.begins_in_backward()))
            return grad

    def begun():
        with autograd.begun_in_backward():
            seen.append(("begun", autograd.in_backward(), autograd.begins_in_backward()))

    def hook(grad):
        seen.append(("hook", autograd.in_backward(), autograd.begins_in_backward()))
        begun()

    def repeated(x):
        seen.append(("checkpoint", autograd.in_backward(), autograd.begins_in_backward()))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    y = Function.apply(torch.utils.checkpoint.checkpoint(repeated, x, use_reentrant=False))
    y.register_hook(hook)
    y.sum().backward()
    expected = [("checkpoint", False, False), ("hook", True, True), ("begun", False, False)]
    assert seen == [*expected, ("function", True, False), ("checkpoint", True, False)]
