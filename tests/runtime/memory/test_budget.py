"""Budgets on real layers: fewer bytes for a smaller budget, bit-equal losses and gradients, plans that follow the batch."""

import functools

import pytest

import tunecompile
from tests.support.compare import assert_equal
from tests.support.memory import full_device
from tests.support.memory.budgets import LAYERS, build, needed, step
from tests.support.notes import codes, find, has
from tunecompile.notes.memory import NOTES
from tunecompile.runtime.memory import accounting

pytest.importorskip("transformers")
pytest.importorskip("peft")


@functools.cache
def plain():
    """A step without a budget."""
    return step(build(None))


def test_any_budget_gives_the_same_bits():
    """And what does not fit is run, and told."""
    reference, whole = plain(), needed()
    recomputing = set()
    for share in (1.1, 0.01):
        model = build(int(share * whole))
        assert_equal(step(model), reference)
        assert has(model, "over-budget") is (share < 1)
        recomputing.add(sum(p["layers"] for p in tunecompile.report(model).memory["plans"] if p["recompute"]))
    assert min(recomputing) == 0 and max(recomputing) >= LAYERS - 1


def test_a_budget_takes_the_place_of_checkpointing():
    model = build("1TiB")
    model.gradient_checkpointing_enable()
    assert_equal(step(model), plain())
    assert tunecompile.report(model).memory["plans"] == [
        {"recompute": [], "tiles": 1, "offload": False, "largest_stays": False, "layers": LAYERS}
    ]


@pytest.mark.slow
@pytest.mark.parametrize("floor", [accounting.FLOOR, 0])
def test_checkpointing_alone_is_a_budget(monkeypatch, floor):
    """Of a small batch all is kept; beside little free memory, what fits into what checkpoints would need."""
    monkeypatch.setattr(accounting, "FLOOR", floor)
    model = build(None)
    model.gradient_checkpointing_enable()
    assert_equal(step(model), plain())
    told = tunecompile.report(model)
    assert told.memory["predicted_peak"] <= told.memory["budget"]
    assert any(p["recompute"] for p in told.memory["plans"]) is (floor == 0)
    assert has(told, "checkpointing-is-budget") and not find(told, "over-budget")
    model.gradient_checkpointing_disable()
    assert_equal(step(model), plain())
    assert tunecompile.report(model).memory is None and not find(model, "checkpointing-is-budget")


def test_auto_does_nothing_on_a_cpu():
    model = full_device.build("auto")
    full_device.step(model)
    report = tunecompile.report(model)
    assert report.memory is None and not set(codes(report)) & NOTES.keys()


def test_what_waits_on_the_host_comes_back_as_it_was(to_the_host):
    reference = plain()
    model = build(int(0.85 * needed()))  # room for the copies under way
    for _ in range(3):
        assert_equal(step(model), reference)
    memory, offload = tunecompile.report(model).memory, to_the_host[-1]
    assert [p["recompute"] for p in memory["plans"]] == [[], []] and 0 < sum(
        p["layers"] for p in memory["plans"] if p["offload"]
    ) < LAYERS
    assert memory["offload"]["bytes_out"] == memory["offload"]["bytes_back"] > 0 and offload.blocks.pool.used == 0
