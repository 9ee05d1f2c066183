"""The plan of a whole step: what checkpoints would need as a budget."""

from dataclasses import replace

import pytest

from tunecompile.planner.candidates import CandidateCost
from tunecompile.planner.cost_model import Work
from tunecompile.planner.hardware import Rates
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan
from tunecompile.planner.step_plan import RegionCandidates, RegionRun, StepRequest, solve

HALF = Plan(frozenset({0}))
ROWS = (
    CandidateCost(KEEP, 50, 0, 5, 10, Work(100), Work(200)),
    CandidateCost(HALF, 20, 0, 5, 30, Work(100), Work(250)),
    CandidateCost(RECOMPUTE, 10, 0, 5, 45, Work(100), Work(300)),
)


def request(layers: int, tail: int = 0, **changes) -> StepRequest:
    candidates = {1: RegionCandidates(ROWS, 8, whole=True, passed=10)}
    made = StepRequest(8, (RegionRun(1, layers),), candidates, Rates(1.0, 1.0), 10**6, 1000, tail, checkpointed=True)
    return replace(made, **changes)


@pytest.mark.parametrize("layers, tail", [(1, 0), (2, 0), (8, 0), (32, 0), (8, 200), (8, 1000)])
def test_no_more_than_checkpoints(layers, tail):
    """A checkpointed step holds each layer's input; one layer's saved tensors exist while it runs backwards."""
    made = solve(request(layers, tail))
    limit = max(10 * layers + 40 + 10, 10 * layers + tail)
    assert request(layers, tail).checkpointed_peak() == limit == made.room and made.limit == 1000 + limit
    assert made.choice.fits and made.choice.peak <= limit
    assert made.choice.ms <= layers * 110


def test_room_that_the_tail_leaves_is_used():
    plans = [option.plan for run in solve(request(8, 1000)).choice.options for option in run]
    assert plans.count(RECOMPUTE) == 8, "they hold as much as checkpoints do, beside the tail"
    assert [option.plan for run in solve(request(1)).choice.options for option in run] == [KEEP]


def test_steps_that_wait_for_launches_have_room_for_their_graphs():
    """Beside what checkpoints would need, as far as the device has it."""
    waiting = request(8, launching=5000.0, spare=100)
    made = solve(waiting)
    assert made.spare == 100 and solve(replace(waiting, available=1150)).spare == 150 - made.room
    assert not made.short and solve(replace(waiting, spare=0)).short
    assert made.choice.peak <= waiting.checkpointed_peak()


def test_tokens_scale_it_and_the_device_may_have_less():
    assert request(8, tokens=16).checkpointed_peak() == 2 * request(8).checkpointed_peak()
    assert solve(request(8, available=1050)).room == 50
    assert solve(request(8, ceiling=60)).room == 60
