"""Training health: each fault is seen, a sound training says nothing, and no step waits."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.notes import codes
from tunecompile.trainers.health import Judge

pytestmark = pytest.mark.filterwarnings("ignore")


def noise(count: int, level: float = 2.0, spread: float = 0.2) -> list[float]:
    return (level + spread * torch.randn(count, generator=torch.Generator().manual_seed(1))).tolist()


def judged(kind: str, values: list[float]) -> set[str]:
    judge = Judge()
    return {each.code for step, value in enumerate(values) for each in getattr(judge, kind)(step, value)}


@pytest.mark.parametrize(
    "kind, values, found",
    [
        ("loss", noise(400), set()),
        ("loss", [3 * 0.99**step for step in range(300)], set()),
        ("loss", [*noise(40), 6.0], {"loss-spike"}),
        ("loss", [1.0, 4.0] * 12, {"loss-oscillates"}),
        ("loss", [2.0, float("nan")], {"loss-not-finite"}),
        ("norm", noise(400, 1.0, 0.3), set()),
        ("norm", [*noise(40, 1.0, 0.3), 30.0], {"gradient-norm-jump"}),
        ("norm", [2e4], {"gradient-norm-large"}),
        ("wait", [0.02] * 40, set()),
        ("wait", [0.5] * 40, {"loader-slow"}),
        ("peak", [0.5, 0.99], {"memory-near-budget"}),
    ],
)
def test_what_figures_say(kind, values, found):
    assert judged(kind, values) == found


def test_a_note_is_not_written_at_every_step():
    judge = Judge()
    written = [judge.new(step, judge.norm(step, 2e4)) for step in range(250)]
    assert [step for step, found in enumerate(written) if found] == [0, 100, 200]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def train(model: nn.Module, steps: int, change=lambda step, model: None) -> list[str]:
    watcher = tunecompile.watch(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    torch.manual_seed(0)
    for step in range(steps):
        model(torch.randn(4, 8)).backward()
        change(step, model)
        optimizer.step()
        other.step()
        optimizer.zero_grad()
    watcher.stop()
    assert watcher.steps == steps
    return [each.code for each in watcher.findings if each.code != "loader-slow"]


@pytest.mark.parametrize("optimize", [False, True])
def test_a_sound_training_and_where_a_gradient_broke(optimize):
    model = zoo.Stack(Layer, 3)
    if optimize:
        tunecompile.optimize(model, executor="eager")
    assert train(model, 24) == []

    def spoil(step, model):
        if step == 3:
            for layer in model.layers[:2]:
                layer.linear.weight.grad.fill_(float("nan"))

    found = []
    watch = tunecompile.watch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tunecompile, "watch", lambda model: found.append(watch(model)) or found[-1])
        assert train(model, 4, spoil) == ["gradients-not-finite"]
    assert codes(found[0].findings) and found[0].findings[0].subject == "layers.1.linear.weight"


def test_adapters_that_learn_nothing():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            nn.init.zeros_(self.lora_B.weight)
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).square().mean() + 0.0 * self.lora_B(self.lora_A(x)).sum()

    assert train(Adapted(), 24) == ["dead-adapters"]
