"""One budget for layers of several kinds: each is planned for what it holds."""

import pytest
import torch

import tunecompile
from tests.support.compare import assert_equal
from tunecompile.cli.compare.meters import count_saved_bytes

pytest.importorskip("transformers")
pytest.importorskip("peft")


class TwoKinds(torch.nn.Module):
    """A narrow stack, then a wide one, as a vision tower before a language model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.narrow = torch.nn.ModuleList(Gate(32, 16) for _ in range(6))
        self.wide = torch.nn.ModuleList(Wider(32, 512) for _ in range(6))

    def forward(self, x):
        for layer in (*self.narrow, *self.wide):
            x = layer(x)
        return x.square().mean()


class Gate(torch.nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Wider(Gate):
    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(x)) * self.up(x))


def two_kinds(memory):
    return tunecompile.optimize(TwoKinds().train(), memory=memory, executor="eager")


def two_kinds_step(model, rows=64):
    loss = model(torch.randn(rows, 8, 32, generator=torch.Generator().manual_seed(1)))
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def test_each_kind_of_layer_is_planned_for_what_it_holds():
    reference, free = two_kinds_step(two_kinds(None)), two_kinds("1TiB")
    for _ in range(2):
        assert_equal(two_kinds_step(free), reference)
    budget = free._tunecompile.step.budget
    assert len(budget.surveys.candidates) == 2
    needed = tunecompile.report(free).memory["predicted_peak"]
    saved = count_saved_bytes(free, lambda: free(torch.randn(64, 8, 32)))
    assert needed == pytest.approx(saved, rel=0.35)  # and what the last layer needs to run
    for share in (0.7, 0.3):
        model = two_kinds(int(share * needed))
        for _ in range(3):
            assert_equal(two_kinds_step(model), reference)
        assert any(plan["recompute"] for plan in tunecompile.report(model).memory["plans"])
