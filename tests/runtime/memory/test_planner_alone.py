"""When a device's plan is made, kept, and made anew: candidates and bytes are given, no layer runs."""

import types
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.memory.fake_replays import FakeReplays
from tests.support.memory.planned_layers import HALF, LAYERS, ROOMY, ROWS, TIGHT, TOKENS, planner, plans, step
from tests.support.notes import has
from tunecompile.planner.cost_model import Work
from tunecompile.planner.hardware import Rates
from tunecompile.planner.solver import KEEP, RECOMPUTE, PlanOption
from tunecompile.planner.step_plan import RegionCandidates
from tunecompile.runtime.memory import plan_maker as module
from tunecompile.runtime.memory.accounting import MemoryAccounting
from tunecompile.runtime.memory.plan_maker import GROWN, SHRUNK


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    monkeypatch.setattr(module, "rates_of", lambda *_: Rates(1.0, 1.0))


def test_what_fits_is_kept_and_else_the_fastest_plan_is_made():
    made = planner(ROOMY)
    assert step(made) == KEEP and plans(made) == [KEEP] * LAYERS and made.plans == 1 and made.shortfall is None
    assert made.progress.steps == 1 and made.progress.layers_began and made.progress.survey_step == 1
    assert not made.tight and made.summary()["replans"] == 1
    tight = planner(TIGHT)
    step(tight)
    assert set(plans(tight)) <= {KEEP, HALF, RECOMPUTE} and plans(tight).count(KEEP) < LAYERS and tight.tight
    assert tight.shortfall is None and tight.admitted.choice.fits
    hopeless = planner(100)
    step(hopeless)
    assert plans(hopeless) == [RECOMPUTE] * LAYERS and has(hopeless.report_notes(), "over-budget", tokens=TOKENS)
    hopeless.progress.pressed = True
    hopeless._admit()
    assert hopeless.report_notes() == []


def test_a_plan_serves_batches_that_it_has_room_for():
    made = planner(30_000)
    for tokens in (TOKENS, TOKENS + 1, TOKENS // 2, 1, int(TOKENS * 1.3)):
        step(made, tokens)
    assert made.plans == 1 and made.admitted.tokens == TOKENS
    assert step(made, 2 * TOKENS) != KEEP or RECOMPUTE in plans(made) or HALF in plans(made)
    assert made.plans == 2 and made.admitted.tokens == 2 * TOKENS
    step(made, int(2 * SHRUNK * TOKENS))
    assert made.plans == 2
    step(made, int(2 * SHRUNK * TOKENS) - 1)
    assert made.plans == 3, "what costs time is not kept for a batch that needs less"


def test_the_plan_is_reviewed_where_others_take_memory():
    made = planner(30_000)
    made.memory.gauge.now = 10_000
    step(made)
    first = made.admitted.resident
    for now, count in ((int(GROWN * first), 1), (int(GROWN * first) + 1, 2)):
        made.memory.gauge.now = now
        step(made)
        assert made.plans == count
    made.memory.gauge.now = 0
    step(made)
    assert made.plans == 2


def test_room_that_comes_and_goes(monkeypatch):
    monkeypatch.setattr(MemoryAccounting, "bounds_all", True)
    made = planner(1 << 30)
    gauge = made.memory.gauge
    gauge.free = 40_000
    step(made)
    for free, count in ((39_000, 1), (80_000, 1), (10_000, 2), (10_100, 2), (40_000, 3)):
        gauge.free = free
        step(made)
        assert made.plans == count, free
    assert plans(made) == [KEEP] * LAYERS


def test_a_step_that_exceeded_its_budget_is_planned_anew():
    made = planner(30_000)
    gauge = made.memory.gauge
    step(made)
    gauge.most = 31_000
    step(made)
    assert made.plans == 2 and made.memory.surplus > 0 and not made.progress.exceeded and gauge.released == 2
    made.pause()
    gauge.most = 50_000
    step(made)
    assert made.plans == 2, "a generation between steps"


def test_memory_that_ran_out_is_planned_around():
    made = planner(ROOMY)
    assert not made.retreat(10) and not planner(ROOMY).give_way(10), "nothing is planned yet"
    step(made)
    peak = made.admitted.choice.peak
    made.memory.gauge.most = 7
    assert made.retreat(100) and made.admitted.choice.peak < peak and made.progress.pressed
    assert made.progress.highest == 7, "of a plan that is dropped"
    target = peak - 100
    assert made.admitted.room <= target and made.memory.surplus > 0
    assert made.retreat(None) and plans(made) == [RECOMPUTE] * LAYERS
    assert not made.retreat(None), "there is none that needs less"
    other = planner(ROOMY)
    step(other)
    assert not other.give_way(peak) and other.give_way(peak - 1) and other.memory.ceiling == peak - 1
    other.give_way(peak + 5)
    assert other.memory.ceiling == peak - 1 and other.admitted.choice.peak < peak


def test_regions_are_surveyed_until_no_survey_could_change_the_plan():
    made = planner(TIGHT, regions=2, surveyed=1)
    request = replace(made._request(TOKENS), tokens=TOKENS)
    first, other = made.regions
    roomy = replace(request, available=1 << 20)
    part = RegionCandidates(ROWS[:1], TOKENS, passed=10)
    assert made._is_enough(roomy, other, part) and not made._is_enough(replace(request, available=100), other, part)
    assert not made._all_seen(made.surveys.candidates) and made._all_seen({first: None, other: None})
    made.progress.steps, made.progress.survey_step = 2, 1
    assert made._all_seen({})
    made.progress.steps = 1
    assert [id(found) for found in made._surveyed({first: 1, 7: 2})] == [id(1)]


def test_where_none_fits_regions_are_surveyed_again():
    made = planner(100)
    (region,) = made.regions
    made.surveys.candidates[region] = RegionCandidates(ROWS[:1], TOKENS, passed=10)
    step(made)
    assert made.surveys.reopened == {region} and made.options == {} and made.surveys.needs(region)
    made.surveys.candidates[region] = RegionCandidates(ROWS, TOKENS, whole=True, passed=10)
    made.surveys.reopened.clear()
    made._admit()
    count = made.plans
    step(made)
    assert made.plans == count and plans(made) == [RECOMPUTE] * LAYERS, "it is final"


def test_a_plan_that_cannot_be_made_is_told(monkeypatch):
    """Layers of this kind were surveyed on another device, say. A plan that is there is not lost without a word."""
    made = planner(TIGHT)
    with monkeypatch.context() as patched:
        patched.setattr(module, "solve_from_here", lambda *_: 1 // 0)
        for _ in range(2):
            step(made)
    assert made.admitted is None and len(made.notes) == 1
    assert has(made.report_notes(), "no-memory-plan", subject="cpu", detail="ZeroDivisionError")
    step(made)
    assert made.admitted is not None
    made.progress.tokens, made.progress.exceeded = TOKENS, True
    monkeypatch.setattr(module, "solve_from_here", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        made._review()


def test_layers_follow_their_users_checkpointing_as_long_as_nothing_is_known():
    made = planner(TIGHT, surveyed=False)
    made.layers[1].checkpoint = True
    assert [made._plan_of(slot) for slot in made.layers] == [KEEP, RECOMPUTE, KEEP, KEEP]
    plan, look = (made.begin(), made.plan_for(made.layers[0], "kind", TOKENS))[1]
    assert plan == KEEP and look is not None and made.admitted is None
    assert made.plan_for(made.layers[1], "kind", TOKENS)[1] is None, "the first call of a kind is looked at"
    assert made.plan_for(made.layers[1], "another", TOKENS)[1] is not None
    made._follow_the_user()
    assert plans(made) == [KEEP, RECOMPUTE, KEEP, KEEP] and made.tight and made.summary() is None
    assert made.step_ms() is None


def test_room_is_made_for_what_the_plan_leaves():
    done = []
    kept = types.SimpleNamespace(bytes=0, matrices=[1], release=lambda: done.append("release"))
    replays = FakeReplays(forget=lambda: done.append("forget"))
    made = planner(TIGHT, kept=kept, replays=replays)
    made.offload = types.SimpleNamespace(ahead=None, begin_step=lambda: done.append("begin"), settle=lambda: None)
    step(made)
    assert done == ["begin", "release", "forget"] and made.offload.ahead == made.admitted.choice.ahead
    assert made.offloading == made.admitted.choice.offloads and replays.allowance is not None
    done.clear()
    made._make_room_for(replace(made.admitted, weights=5))
    kept.matrices = []
    made._make_room_for(made.admitted)
    assert done == []
    kept.matrices, made.memory.replays = [1], None
    made._make_room_for(made.admitted)
    assert done == ["release"]


def test_plans_are_weighed_again_where_recordings_would_save_much_more_than_was_known():
    """The clock of one kind of layers may tell before another's. Recordings of plans that are followed no more are dropped."""
    saving, dropped = [0.0], []
    replays = FakeReplays(bytes=7, saving=lambda tokens: saving[0], forget=lambda: dropped.append(saving[0]))
    made, counts = planner(8000, replays=replays), []
    for saving[0] in (0.0, 0.0, 2e-9, 2.5e-9, 1e9, 1.2e9):
        made.begin()
        step(made)
        counts.append(made.plans)
    assert counts == [1, 1, 2, 2, 3, 3], "once more for 2, and for 1e9"
    assert made.admitted.saving == 1e9 and dropped == [1e9] and made.admitted.records_all


def test_recordings_make_way_for_a_larger_batch():
    """By what the plan needs for it; a batch of the same size leaves them."""
    dropped = []
    replays = FakeReplays(bytes=5000, forget=lambda: dropped.append(1))
    made = planner(30_000, replays=replays)
    for tokens, count in ((TOKENS, 0), (TOKENS, 0), (int(1.1 * TOKENS), 0), (int(1.3 * TOKENS), 1)):
        step(made, tokens)
        assert len(dropped) == count, tokens
    assert made.plans == 1 and 20_000 < made.admitted.choice.peak * 1.1 < 25_000 - 1500


@pytest.mark.parametrize("steps, first", [(1, True), (2, False)])
def test_the_optimizers_state_comes_with_the_first_step(steps, first, monkeypatch):
    """Later on it is there, and counts among what others hold."""
    asked, made = [], planner(ROOMY)
    request = MemoryAccounting.request
    monkeypatch.setattr(
        MemoryAccounting, "request", lambda self, *given: asked.append(given[-1]) or request(self, *given)
    )
    for _ in range(steps):
        made.begin()
    made.plan_for(made.layers[0], "kind", TOKENS)
    assert asked == [first]


def test_a_full_device_has_what_recordings_took():
    """Where the smallest plan is followed, too."""
    dropped = []
    replays = FakeReplays(forget=lambda: dropped.append(setattr(replays, "bytes", 0)))
    for room in (TIGHT, 100):
        made = planner(room, replays=replays)
        step(made)
        assert made.retreat(None) is (room == TIGHT) and not dropped
        replays.bytes, made.memory.gauge.released = 7, 0
        assert made.retreat(None) and dropped.pop() is None and made.memory.recordings.dropped == 1
        assert made.memory.gauge.released == 1, "before the part runs again"


def test_what_waits_is_scaled_to_the_batch_of_the_plan():
    made = planner(TIGHT)
    slot, saved = made.layers[0], torch.zeros(100, dtype=torch.uint8)
    assert not made._leaves(slot, saved)
    step(made)
    asked = []
    made.options[id(slot)] = types.SimpleNamespace(offloads_tensor=lambda nbytes: asked.append(nbytes) or True)
    for tokens in (TOKENS, 2 * TOKENS, TOKENS // 2):
        made.progress.tokens = tokens
        assert made._leaves(slot, saved)
    assert asked == [100, 50, 100]
    del made.options[id(slot)]
    assert not made._leaves(slot, saved)


def test_milliseconds_of_a_step():
    made = planner(TIGHT)
    step(made)
    made.speed = Rates(1.0, 1.0)
    assert made.step_ms() is None
    made.memory.model = nn.Linear(1000, 1000)
    made.speed = Rates(1e6, 1e6, 1e6, launches=True)
    assert made.step_ms() > made.admitted.choice.work


def test_the_report_counts_layers_by_plan():
    made = planner(TIGHT)
    step(made)
    told = made.summary()
    assert told["tokens"] == TOKENS and told["budget"] == TIGHT and told["predicted_peak"] == made.admitted.peak
    assert sum(plan["layers"] for plan in told["plans"]) == LAYERS and told["offload"] is None
    assert told["measured_peak"] is None and told["kept_weights"] == 0 and told["device"] == "cpu"
    made.memory.checkpointed = True
    assert made.summary()["budget"] == made.admitted.limit
    assert made.around(made.layers[0]).__enter__() is None


def test_one_layers_part_of_the_options():
    option = PlanOption(KEEP, 0, 0, 0, 0.0)
    made = planner(ROOMY, regions=2)
    step(made)
    made.options = {id(slot): option for slot in made.layers}
    first, _ = made.regions
    made.surveys.candidates[first] = replace(made.surveys.candidates[first], whole=False)
    made.progress.steps = 5
    assert made._survey_again() and made.progress.survey_step == 5
    assert list(made.options) == [id(slot) for slot in made.layers[2:]] and made.surveys.reopened == {first}
    made.surveys.candidates[first] = replace(made.surveys.candidates[first], whole=True)
    assert not made._survey_again() and len(made.options) == 2


def test_a_kind_that_is_met_in_the_middle_of_a_step_leaves_what_ran_as_it_is():
    """Two layers kept all, by a plan for all that knew no other kind; it holds until the next step."""
    made = planner(26_000, regions=2, surveyed=1)
    for slot in made.layers[:2]:
        assert (step(made) if slot is made.layers[0] else made.plan_for(slot, "kind", TOKENS)[0]) == KEEP
        made.follow(slot, None)
    slow = (replace(ROWS[0], returned=8000), replace(ROWS[2], backward_work=Work(90_000)))
    made.surveys.candidates[made.regions[1]] = RegionCandidates(slow, TOKENS, whole=True, passed=10)
    made._admit(made._held())
    assert made.admitted.for_one_step and made.admitted.choice.fits and plans(made)[:2] == [KEEP, KEEP]
    bent = plans(made)
    step(made)
    assert not made.admitted.for_one_step and plans(made) != bent and made.ran == {}
    made.follow(made.layers[0], None)
    made.progress.tokens += 1
    assert made._held() == [None] * LAYERS, "bytes of another batch"
