"""Losses that use what left a layer beside its return value, under a budget: such a layer is not repeated, and gradients are eager's."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.notes import has
from tunecompile.runtime.memory.budget import RuntimePlanner

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
BUDGET = "1GiB"


def router(model: nn.Module, batch: dict) -> torch.Tensor:
    return model(**batch, output_router_logits=True).loss


def hidden_states(model: nn.Module, batch: dict) -> torch.Tensor:
    found = model(**batch, output_hidden_states=True)
    return found.loss + found.hidden_states[1].square().mean()


def hook(model: nn.Module, batch: dict) -> torch.Tensor:
    kept = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: kept.append(output))
    found = model(**batch).loss
    handle.remove()
    (activation,) = kept
    return found + activation.square().mean()


def hook_on_all(model: nn.Module, batch: dict) -> torch.Tensor:
    kept = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: kept.append(output) if "MLP" in type(module).__name__ else None
    )
    found = model(**batch).loss
    handle.remove()
    return found + sum(activation.square().mean() for activation in kept) / len(kept)


def train(model: nn.Module, loss, batch: dict) -> tuple[torch.Tensor, dict]:
    model.zero_grad()
    found = loss(model, batch)
    found.backward()
    return found.detach(), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(
    "family, loss",
    [
        pytest.param("llama", hook, marks=pytest.mark.slow),
        ("llama", hidden_states),
        pytest.param("llama", hook_on_all, marks=pytest.mark.slow),
        pytest.param("mixtral", router, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "first", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["in the first step", "later"]
)
def test_a_loss_of_what_a_hook_keeps(family, loss, first):
    """transformers collects router logits and hidden states by hooks, too."""
    reference, model = (zoo.make(family, num_hidden_layers=2).train() for _ in range(2))
    model = tunecompile.optimize(model, memory=BUDGET, executor="eager")
    batch = zoo.batch()
    if not first:
        train(model, lambda model, batch: model(**batch).loss, batch)
    for _ in range(2):
        expected, gradients = train(reference, loss, batch)
        found, mine = train(model, loss, batch)
        torch.testing.assert_close(found, expected)
        assert set(mine) == set(gradients) and max(zoo.errors(mine, gradients).values()) < 1e-5
    assert not first or has(model, "layers-not-repeated", reason="have-hooks")


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


@pytest.mark.parametrize("which", [{0, 1, 2}, {1}], ids=["all", "one"])
@pytest.mark.parametrize("broken", [False, True], ids=["whole", "in pieces"])
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
