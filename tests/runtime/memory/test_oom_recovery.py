"""Out of memory under a budget: the step goes on, and losses and gradients are bit for bit those of a step that nothing disturbed."""

import logging

import pytest
import torch
from torch import nn

import tunecompile
from tests.support.compare import assert_equal
from tests.support.memory.budgets import LAYERS
from tests.support.memory.full_device import (
    FULL,
    WHERE,
    Full,
    Tiny,
    build,
    gradients,
    graphs,
    guarded,
    loss,
    needed,
    peak,
    plain,
    step,
)
from tests.support.notes import has, logged
from tunecompile.runtime.loss_head import losses

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


# -- the step goes on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
def test_the_step_goes_on_with_the_same_bits(where, caplog):
    model = guarded()
    before, full = peak(model), Full(model, 1, where)
    with caplog.at_level(logging.WARNING, "tunecompile"):
        assert_equal(step(model), plain())
        assert_equal(step(model), plain())
    assert full.raised == 1 and peak(model) < before and not graphs(model)
    (record,) = [record for record in caplog.records if record.name == "tunecompile"]
    assert has(record.args, "ran-out-of-memory", subject="the step", before="4 layers keep")
    assert has(model, "ran-out-of-memory", before="4 layers keep")


def test_in_the_very_first_step():
    model = build(int(1.2 * needed()))
    full = Full(model, 2, WHERE[0])
    assert_equal(step(model), plain())
    assert full.raised == 1 and any(plan["recompute"] for plan in tunecompile.report(model).memory["plans"])


def test_in_head_and_loss(monkeypatch):
    model, seen, whole = guarded(), [], losses.linear_cross_entropy
    reference = plain()

    def full(*args):
        seen.append(graphs(model))
        if len(seen) == 1:
            raise torch.OutOfMemoryError(FULL)
        return whole(*args)

    monkeypatch.setattr(losses, "linear_cross_entropy", full)
    assert_equal(step(model), reference)
    assert seen == [LAYERS, 0]


def test_in_the_final_norm():
    model, left = guarded(), [1]

    def full(*_):
        if left and left.pop():
            raise torch.OutOfMemoryError(FULL)

    model.backbone.norm.register_forward_hook(full)
    assert_equal(step(model), plain())
    assert not left


def test_a_head_that_is_no_linear_is_none_of_the_plans():
    model = Tiny().train()
    model.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))
    tunecompile.optimize(model, memory=int(0.7 * needed()), executor="eager")
    for _ in range(2):
        step(model)
    assert any(plan["recompute"] for plan in tunecompile.report(model).memory["plans"])


@pytest.mark.parametrize("where", ["layer", "loss"])
def test_without_a_budget_the_user_hears_what_makes_room(where, monkeypatch, caplog):
    model = build(None)

    def full(*_):
        raise torch.OutOfMemoryError(FULL)

    if where == "layer":
        model.backbone.layers[1].down.register_forward_hook(full)
    else:
        monkeypatch.setattr(losses, "linear_cross_entropy", full)
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "tunecompile"), pytest.raises(torch.OutOfMemoryError, match="2.00 KiB"):
            step(model)
    assert logged(caplog.records) == ["no-budget"]


# -- gradients that are there already, and those who watch them ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_accumulated_gradients_are_kept(where):
    model, reference = guarded(), build(None)
    for m in (model, reference):
        torch.manual_seed(5)
        for rows in (4, 5, 4):
            if m is model and rows == 5:
                before = {name: p.grad for name, p in m.named_parameters()}
                full = Full(m, 1, where)
            loss(m, rows).backward()
    assert full.raised == 1 and all(p.grad is before[name] for name, p in model.named_parameters())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters()))


# -- models and loops -----------------------------------------------------------------------------------------------------------


def test_what_waits_on_the_host(to_the_host):
    model = build(int(0.7 * needed()))
    assert_equal(step(model), plain())
    assert any(plan["offload"] for plan in tunecompile.report(model).memory["plans"])
    full = Full(model, 1, WHERE[0])
    for _ in range(3):
        assert_equal(step(model), plain())
    assert full.raised == 1 and to_the_host[-1].report()["host_bytes"] == 0


def test_a_model_without_layers():
    def make(memory):
        torch.manual_seed(0)
        return tunecompile.optimize(
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 8)),
            memory=memory,
            executor="eager",
        )

    def run(model):
        torch.manual_seed(3)
        found = model(torch.randn(16, 8)).square().mean()
        found.backward()
        return found.detach(), gradients(model)

    model = make("64KiB")
    full = Full(model, 0, WHERE[0])
    assert_equal(run(model), run(make(None)))
    assert full.raised == 1
