"""A budget so tight that layers would go to the host: once it is known that kernels wait for it, all are recorded."""

import pytest

import tunecompile
from tests.support.compare import assert_close, assert_equal
from tests.support.memory.budgets import LAYERS, build, needed, step
from tests.support.memory.cpu_recorder import CpuRecorder
from tests.support.models.pairs import small
from tunecompile.runtime.cuda_graphs import launch_bound, replay

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)


@pytest.mark.usefixtures("recorder", "to_the_host")
def test_layers_come_back_from_the_host_to_be_recorded(monkeypatch):
    """Copies cost nothing here, and products something: it is what recordings save that pays for computing again."""
    from tunecompile.planner.hardware import Rates
    from tunecompile.runtime.memory import plan_maker

    monkeypatch.setattr(plan_maker, "rates_of", lambda *_: Rates(flops=1e12, copy=1e12))
    reference = step(build(None, make=small))
    model = build(int(0.85 * needed(make=small)), make=small)
    state = model._tunecompile
    for number in range(9):
        assert_equal(step(model), reference)
        if number < 2:
            assert state.step.budget.admitted.choice.offloads and not state.replays.recorded
    made = state.step.budget.admitted
    assert made.saving > 0 and made.choice.fits
    plans = tunecompile.report(model).memory["plans"]
    assert not made.choice.offloads and not any(plan["offload"] for plan in plans)
    assert state.replays.recorded == 2 * LAYERS, tunecompile.report(model)
    assert made.records_all and any(plan["recompute"] for plan in plans)
    assert len({option.plan for run in made.choice.options for option in run}) == len(state.replays.recorder.pools)
    assert state.step.budget.plans <= 5


@pytest.mark.usefixtures("recorder", "to_the_host")
def test_sizes_that_change_are_planned_once(monkeypatch):
    """What recordings would save is known here, too, and yet none would be replayed: no other plan is compiled for them."""
    from tunecompile.planner.hardware import Rates
    from tunecompile.runtime.memory import plan_maker

    monkeypatch.setattr(plan_maker, "rates_of", lambda *_: Rates(flops=1e12, copy=1e12))
    model, reference = build(int(0.85 * needed())), build("eager")
    state = model._tunecompile
    for length in (16, 15, 14, 16, 13, 15, 16, 14, 13, 16):
        assert_close(step(model, length=length), step(reference, length=length))
    assert state.replays.saving(0) > 0 and state.step.budget.plans == 1, tunecompile.report(model)
    assert state.step.budget.admitted.choice.offloads and not state.replays.recorded
