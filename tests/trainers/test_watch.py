"""Training health: each fault is seen, a sound training says nothing, and no step waits."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.notes import codes, find
from tunecompile.trainers import watch as watching
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
    model = zoo.Stack(zoo.Layer, 3)
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


class Divides(zoo.Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))

    def forward(self, x):
        return super().forward(x) / self.scale + 0.0 * (x + self.mask[0]).softmax(-1)


def test_the_op_that_made_it():
    """By one more forward pass, before a step breaks the weights; a mask's infinity is none of it."""
    model = zoo.Stack(Divides, 3)
    watcher = tunecompile.watch(model)

    def spoil(step, model):
        if step == 2:
            model.layers[1].scale.zero_()

    assert set(train(model, 4, spoil)) == {"loss-not-finite", "made-not-finite", "gradients-not-finite"}
    (made,) = find(watcher.findings, "made-not-finite", subject="layers.1", op="div", step=4)
    assert made.detail.startswith("test_watch.py:") and all(module.training for module in model.modules())


def test_a_weight_that_a_step_broke():
    model = zoo.Stack(zoo.Layer, 2)
    watcher = tunecompile.watch(model)

    def spoil(step, model):
        if step == 2:
            model.layers[0].linear.weight.grad.fill_(float("nan"))

    train(model, 4, spoil)
    assert find(watcher.findings, "weight-not-finite", subject="layers.0.linear.weight", step=4)
    assert find(watcher.findings, "gradients-not-finite", step=3)


def test_experts_without_tokens(monkeypatch):
    """In a stack, in a list of modules, and under PEFT's adapters of a stack."""
    monkeypatch.setattr(watching, "EXPERTS_AT", 10)

    class Wrapper(nn.Module):
        num_experts = 3

        def __init__(self):
            super().__init__()
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2 * 3, 8, bias=False)})

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.stacked = nn.ModuleDict({"experts": nn.ParameterDict({"up": nn.Parameter(torch.ones(4, 8, 8))})})
            self.listed = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})
            self.adapted = nn.ModuleDict({"experts": Wrapper()})

        def forward(self, x):
            stacked = x @ self.stacked["experts"]["up"][1] + x @ self.stacked["experts"]["up"][3]
            adapter = self.adapted["experts"].lora_B["default"].weight.view(8, 2, 3)
            return (stacked + self.listed["experts"][0](x)).square().mean() + (x @ adapter[:, :, 1]).mean()

    model = Mixture()
    watcher = tunecompile.watch(model)
    assert "idle-experts" in train(model, 11)
    (idle,) = find(watcher.findings, "idle-experts", subject="stacked.experts.up", looks=2)
    assert idle.fields["count"] == 2 + 3 + 2


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
