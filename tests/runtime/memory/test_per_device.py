"""Layers on several devices: a plan for each, and one device's want of memory is its own. (A CPU stands for two: by its number, or by none.)"""

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

import tunecompile
from tests.support.compare import assert_equal
from tests.support.memory.budgets import LAYERS
from tests.support.memory.full_device import Full, build, graphs, needed, plain, step
from tests.support.notes import has
from tunecompile.planner import candidates
from tunecompile.planner.device_memory import HostGauge
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.memory import per_device
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.rng_autocast import RngAutocastState

pytest.importorskip("transformers")
FIRST, LAST = torch.device("cpu", 1), torch.device("cpu")  #: the head is on the last
HALF = LAYERS // 2


@pytest.fixture(autouse=True)
def spread(monkeypatch):
    """The first half of the layers is on another device. (What all need on one is asked before.)"""
    needed()
    monkeypatch.setattr(LayerSlot, "device", property(lambda slot: FIRST if slot.place < HALF else LAST))


def computing_again(model):
    """By device, how many layers do."""
    report = tunecompile.report(model)
    return {
        plan["device"]: sum(each["layers"] for each in plan["plans"] if each["recompute"])
        for plan in (report.memory, *report.elsewhere)
    }


def on_each(model):
    first, last = model._tunecompile.step.budgets
    assert (first.device, last.device) == (FIRST, LAST)
    return first, last


def test_each_device_has_a_plan_of_its_own(monkeypatch):
    """What is too little for all layers on one device does for half of them on each; and the last one needs room for head and loss."""
    surveyed, survey = [], candidates.survey
    monkeypatch.setattr(candidates, "survey", lambda *args: surveyed.append(1) or survey(*args))
    memory = int(0.8 * needed())
    model = build(memory)
    for _ in range(3):
        assert_equal(step(model), plain())
    surveyed_on_two = len(surveyed)
    first, last = on_each(model)
    assert computing_again(model) == {"cpu:1": 0, "cpu": 0} and first.memory.tail(32) == 0 < last.memory.tail(32)
    assert max(budget.admitted.choice.peak for budget in (first, last)) <= memory

    monkeypatch.undo()
    monkeypatch.setattr(candidates, "survey", lambda *args: surveyed.append(1) or survey(*args))
    together = build(memory)
    step(together)
    assert len(together._tunecompile.step.budgets) == 1 and computing_again(together)["cpu"] > 0
    assert surveyed_on_two <= len(surveyed) - surveyed_on_two, "layers of one kind are surveyed once"


def test_the_device_that_is_full_plans_for_less():
    model = build(int(1.2 * needed()))
    step(model)
    budgets = on_each(model)
    before, steps = [budget.admitted.choice.peak for budget in budgets], [budget.progress.steps for budget in budgets]
    full = Full(model, 0, "forward")
    assert_equal(step(model), plain())
    assert_equal(step(model), plain())
    smaller = [budget.admitted.choice.peak < peak for budget, peak in zip(budgets, before)]
    assert full.raised == 1 and smaller == [True, False], "the other device keeps its plan"
    assert [budget.progress.steps for budget in budgets] == [count + 2 for count in steps] and not graphs(model)
    assert has(model, "ran-out-of-memory", detail="cpu:1")


def test_the_error_says_which_device_is_full(monkeypatch):
    """Not the count of allocations that failed: some are dealt with by whoever made them (a prefetch). Behind the layers, the last one to run says nothing."""
    from tunecompile.runtime.loss_head import losses

    whole, left = losses.linear_cross_entropy, [1]

    @dataclass
    class Counting(HostGauge):
        device: torch.device

        def failures(self):
            return int(self.device == LAST and not left)

    def full(*args):
        if left and left.pop():
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 KiB. GPU 1 has a total capacity of 1.00 MiB"
            )
        return whole(*args)

    monkeypatch.setattr(per_device, "gauge_of", Counting)
    model = build(int(1.2 * needed()))
    step(model)
    first, last = on_each(model)
    before = first.admitted.choice.peak, last.admitted.choice.peak
    monkeypatch.setattr(losses, "linear_cross_entropy", full)
    left[:] = [1]
    for _ in range(2):
        assert_equal(step(model), plain())
    assert first.admitted.choice.peak < before[0] and last.admitted.choice.peak == before[1]


def test_a_frozen_device_decides_for_nobody_else():
    """Its layers' graphs show no backward; what is compiled for them serves the other device's, and asks that device's budget."""
    asked, see = [], RuntimePlanner._see

    def watched(budget, slot, joint):
        asked.append((budget.device, slot.place))
        return see(budget, slot, joint)

    with patch.object(RuntimePlanner, "_see", watched):
        model = build(int(0.7 * needed()))
        for layer in model.backbone.layers[:HALF]:
            layer.requires_grad_(False)
        model.backbone.embed.requires_grad_(False)
        step(model)
    assert asked and all(device == LAST and place >= HALF for device, place in asked)


def test_what_tells_of_it_tells_of_all_devices(tmp_path):
    pytest.importorskip("matplotlib")
    model = build(int(1.2 * needed()))
    step(model)
    report = tunecompile.report(model)
    assert "memory of cpu:1: peak predicted" in str(report) and "memory of cpu: peak predicted" in str(report)
    assert [plan["device"] for plan in (report.to_dict()["memory"], *report.to_dict()["elsewhere"])] == ["cpu:1", "cpu"]
    page = tunecompile.memory_timeline(model, tmp_path / "memory.html").read_text()
    assert "<h1>cpu:1</h1>" in page and "<h1>cpu</h1>" in page and f"<td>{HALF} to {LAYERS - 1}</td>" in page


@pytest.mark.gpu
def test_random_numbers_of_every_gpu_are_remembered():
    torch.cuda.init()
    there = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    start = RngAutocastState.now(*there)
    drawn = [torch.rand(4, device=device) for device in there]
    start.rewind()
    assert all(torch.equal(torch.rand(4, device=device), numbers) for device, numbers in zip(there, drawn))
