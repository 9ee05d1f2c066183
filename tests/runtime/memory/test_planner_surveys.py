"""What a device's planner does where a survey fails, and what it tells of steps that others planned: no layer runs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.memory.planned_layers import LAYERS, ROOMY, ROWS, TIGHT, TOKENS, planner, plans, step
from tests.support.notes import has
from tunecompile.planner.hardware import Rates
from tunecompile.planner.solver import KEEP, RECOMPUTE
from tunecompile.planner.step_plan import RegionCandidates
from tunecompile.runtime.memory import plan_maker as module

JOINT = SimpleNamespace(graph=None)


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    monkeypatch.setattr(module, "rates_of", lambda *_: Rates(1.0, 1.0))


def looking(made, slot=0, kind="kind"):
    """A step's beginning, and what makes the plan of a layer's graph."""
    made.begin()
    return made.plan_for(made.layers[slot], kind, TOKENS)[1]


def finding(monkeypatch, rows, error=None):
    """A survey that finds these plans, and may fail then."""
    found = rows and RegionCandidates(rows, TOKENS, passed=10)
    monkeypatch.setattr(module, "survey", lambda *_: SimpleNamespace(found=found, error=error))


def test_layers_follow_their_user_where_the_first_survey_fails(monkeypatch):
    made = planner(TIGHT, surveyed=False)
    made.layers[2].checkpoint = True
    look = looking(made)

    def fail(*_):
        raise RuntimeError("cannot be cut like that")

    monkeypatch.setattr(module, "survey", fail)
    assert look(JOINT) == KEEP and plans(made) == [KEEP, KEEP, RECOMPUTE, KEEP] and made.admitted is None
    assert has(made.report_notes(), "no-memory-plan", subject="layers", detail="RuntimeError: cannot be cut like that")
    assert looking(made, 1) is None, "the next step's layers have what they follow"


@pytest.mark.parametrize("before, found, left", [(3, 2, 3), (1, 2, 2), (2, 0, 2), (0, 2, 2)])
def test_a_survey_that_fails_leaves_the_most_that_was_found(before, found, left, monkeypatch):
    """And is not tried again: it would fail again."""
    made = planner(TIGHT, surveyed=False)
    look, (region,) = looking(made), made.regions
    if before:
        made.surveys.candidates[region] = RegionCandidates(ROWS[:before], TOKENS, passed=10)
    finding(monkeypatch, ROWS[:found] if found else None, RuntimeError("no more"))
    made.surveys.reopened.add(region)
    look(JOINT)
    known = made.surveys.candidates[region]
    assert len(known.rows) == left and known.whole and not made.surveys.reopened and made.admitted is not None
    assert has(made.report_notes(), "few-memory-plans", subject="layers", detail="no more") and len(made.notes) == 1


def test_a_survey_makes_the_plan_of_its_own_step(monkeypatch):
    """Of all layers; memory for copies is allocated while code is generated, where there will be any."""
    for room, offloads in ((TIGHT, False), (TIGHT, True)):
        expected = []
        made = planner(room, surveyed=False)
        look = looking(made)
        made.offload = SimpleNamespace(expect=expected.append, ahead=None)
        monkeypatch.setattr(made, "_make_room_for", lambda made_: setattr(made, "offloading", offloads))
        finding(monkeypatch, ROWS)
        assert look(JOINT) == made.options[id(made.layers[0])].plan and len(made.options) == LAYERS
        assert expected == ([made.admitted.choice.waiting] if offloads else []) and made.notes == []
        assert made.surveys.called and all(made.surveys.called.values())


def test_plans_of_batches_that_were_planned():
    """A layer outside of a step, say in a scoring pass, may follow what is known; larger batches have no plan."""
    made = planner(TIGHT)
    slot = made.layers[0]
    assert made.known_plan(slot, 1) is None
    step(made)
    plan = made.options[id(slot)].plan
    assert (
        made.known_plan(slot, TOKENS) == made.known_plan(slot, 1) == plan and made.known_plan(slot, TOKENS + 1) is None
    )
    made.admitted, before = None, made.admitted
    assert made.known_plan(slot, 1) is None
    made.admitted, made.options = before, {}
    assert made.known_plan(slot, 1) is None


def test_values_that_are_recomputed_have_the_names_of_their_region():
    made = planner(TIGHT, surveyed=False)
    slot, (region,) = made.layers[0], made.regions
    assert made.recomputed(slot, ROWS[1].plan) == () and made.recomputed(slot, RECOMPUTE) == ("everything",)
    made.surveys.candidates[region] = replace(RegionCandidates(ROWS, TOKENS, passed=10), names=("mm 2x2",))
    assert made.recomputed(slot, ROWS[1].plan) == ("mm 2x2",)


@pytest.mark.parametrize("kept", [True, False])
def test_weights_are_weighed_where_they_may_stay_dequantised(kept, monkeypatch):
    made, asked = planner(TIGHT, surveyed=False), []
    look = looking(made)
    made.memory.kept = SimpleNamespace(bytes=0, matrices=[]) if kept else None
    found = RegionCandidates(ROWS, TOKENS, whole=True, passed=10)
    monkeypatch.setattr(
        module, "survey", lambda *given: asked.append(given) or SimpleNamespace(found=found, error=None)
    )
    look(JOINT)
    ((joint, tokens, _, enough, weighs),) = asked
    assert (joint, tokens, weighs) == (JOINT, TOKENS, kept) and enough(found) is True
    assert enough(RegionCandidates(ROWS[:1], TOKENS, passed=10)) is False


def test_a_full_device_surveys_what_it_knows_in_part():
    """There may be a smaller plan, so that it makes sense to try again: a first survey ends with the first that fits."""
    made = planner(30_000)
    (region,) = made.regions
    made.surveys.candidates[region] = RegionCandidates(ROWS[:1], TOKENS, passed=10)
    step(made)
    assert made.admitted.choice.fits and made.retreat(None) is True and made.admitted.room == 0
    assert made.surveys.reopened == {region} and made.surveys.needs(region)


def test_a_full_device_plans_for_just_what_was_missing():
    """Or for a share of the peak, where that is more: another try would miss as much again."""
    for missing, room in ((100, 20_010 - 1000), (3000, 20_010 - 3000), (None, 0)):
        made = planner(ROOMY)
        step(made)
        assert made.admitted.choice.peak == 20_010 and made.retreat(missing) and made.admitted.room == room


def test_the_first_steps_of_a_plan_are_sampled_under_their_numbers():
    made = planner(TIGHT)
    for _ in range(2):
        step(made)
    trace = made.trace
    assert (trace.step, trace.plan, trace.tokens) == (2, made.admitted.choice.options, TOKENS)
    assert [(sample.kind, sample.place) for sample in trace.samples] == [("forward", 0)]


def test_the_peak_of_a_plan_that_is_dropped_is_that_of_tensors():
    """What the allocator holds beside them is no peak of a step."""
    made = planner(ROOMY)
    step(made)
    made.memory.gauge.peak = lambda: (7, 9)
    made.retreat(None)
    assert made.progress.highest == 7
