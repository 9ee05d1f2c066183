"""Losses that use what left a layer beside its return value, under a budget: such a layer is not repeated, and gradients are eager's."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_close
from tests.support.notes import has
from tunecompile.runtime.memory.budget import RuntimePlanner

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
BUDGET = "1GiB"


def hidden_states(model: nn.Module, batch: dict) -> torch.Tensor:
    found = model(**batch, output_hidden_states=True)
    return found.loss + found.hidden_states[1].square().mean()


def test_a_loss_of_what_a_hook_keeps():
    """transformers collects hidden states by hooks."""
    reference, model = (zoo.make("llama", num_hidden_layers=2).train() for _ in range(2))
    model = tunecompile.optimize(model, memory=BUDGET, executor="eager")
    batch = zoo.batch()
    for _ in range(2):
        assert_close(*(zoo.step(each, batch, loss=hidden_states) for each in (model, reference)), limit=1e-5)
    assert has(model, "layers-not-repeated", reason="have-hooks")


class Layer(nn.Module):
    """Leaves its auxiliary loss in an attribute, and what has no history as well."""

    def __init__(self, auxiliary: bool):
        super().__init__()
        self.score, self.out, self.auxiliary = nn.Linear(32, 32), nn.Linear(32, 32), auxiliary
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.score(x).softmax(-1)
        self.best, self.mean = share.argmax(-1), share.detach().mean(0)
        self.seen.add_(self.mean)
        if self.auxiliary:
            self.loss = share.mean(0).square().sum()
        return x + self.out(share * x)


@pytest.mark.parametrize("auxiliary", [True, False])
def test_a_loss_in_an_attribute(auxiliary):
    def run(model):
        model.zero_grad()
        found = model(torch.linspace(-1, 1, 256).view(8, 32)).square().mean()
        (found + sum(layer.loss for layer in model.layers) if auxiliary else found).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    def make():
        torch.manual_seed(0)
        return zoo.Stack(lambda: Layer(auxiliary), 3).train()

    reference, model = make(), tunecompile.optimize(make(), memory=BUDGET, executor="eager")
    for _ in range(2):
        assert max(zoo.errors(run(model), run(reference)).values()) < 1e-5
    assert has(model, "layers-not-repeated", reason="expose-tensors") == auxiliary


class Listed(nn.Module):
    """Counts its calls; leaves its auxiliary loss in a list, if `auxiliary`."""

    losses: list[torch.Tensor] = []

    def __init__(self, auxiliary: bool, broken: bool):
        super().__init__()
        self.out, self.auxiliary, self.broken = nn.Linear(32, 32), auxiliary, broken
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.auxiliary:
            self.calls.add_(1)
        y = self.out(x).tanh()
        if self.broken:
            torch._dynamo.graph_break()
        if self.auxiliary:
            self.losses.append(
                y.square().mean()
            )  # (by the class's name torch 2.11 appends to nothing, also without us)
        return x + y


@pytest.mark.parametrize("which, broken", [({0, 1, 2}, True), ({1}, False)], ids=["all, in pieces", "one, whole"])
def test_losses_in_a_list(which, broken, monkeypatch):
    """No layer runs twice, in its first step or later: layers of one kind may differ in what they hand out."""
    monkeypatch.setattr(RuntimePlanner, "tight", True)  # or layers are left alone, from the plan on

    def run(model):
        model.zero_grad()
        Listed.losses = []
        found = model(torch.linspace(-1, 1, 256).view(8, 32)).square().mean() + sum(Listed.losses)
        assert len(Listed.losses) == len(which)
        found.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    def make():
        torch.manual_seed(0)
        places = iter(range(3))
        return zoo.Stack(lambda: Listed(next(places) in which, broken), 3).train()

    reference, model = make(), tunecompile.optimize(make(), memory=BUDGET, executor="eager")
    for _ in range(3):
        assert max(zoo.errors(run(model), run(reference)).values()) < 1e-5
    assert all(map(torch.equal, model.buffers(), reference.buffers()))
    assert has(model, "layers-not-repeated", reason="several-graphs" if broken else "expose-tensors")
