"""What CUDA graphs may take of a budget: plans are given, and so is what launches take."""

import pytest
import torch

from tests.support.memory.fake_replays import FakeReplays
from tunecompile.planner.recorded import RECORDED, recorded_step
from tunecompile.planner.solver import KEEP, LayerRun, Plan, PlanOption, choose
from tunecompile.planner.step_plan import AdmittedPlan, leave_room_for_graphs
from tunecompile.runtime.memory.graph_allowance import MAX_DROPPED, Recordings

OPTIONS = (
    PlanOption(KEEP, 100, 0, 0, 0.0),
    PlanOption(Plan(None), 20, 0, 0, 1.0),
    PlanOption(KEEP, 0, 0, 0, 0.5, offloaded=100),
)
STACKS = [LayerRun(10, OPTIONS)]


def recordings(nbytes=0):
    return Recordings(FakeReplays(bytes=nbytes), torch.device("cpu"))


def weighed(gain, room=1040, tail=0):
    """The choice, and whether it is short of room for recordings."""
    return leave_room_for_graphs(choose(STACKS, room, tail), STACKS, room, tail, gain)


def test_a_smaller_plan_is_worth_what_it_computes_again_or_is_not():
    """Of ten layers, a few compute again to make room for all recordings; 40 of 1,000 bytes are free beside those that keep everything."""
    chosen, short = weighed(100.0)
    assert chosen.fits and RECORDED * chosen.peak <= 1040 and 0 < chosen.ms <= 2 and not short
    for gain in (0.0, 0.9):
        assert weighed(gain)[0] == choose(STACKS, 1040)
    assert weighed(100.0, room=1150)[0] == choose(STACKS, 1150), "there is room beside"


def test_what_is_recorded_stays_on_the_device():
    chosen, _ = weighed(100.0, room=700)
    assert choose(STACKS, 700).offloads and not chosen.offloads and chosen.peak < 700


def test_no_smaller_plan_is_known():
    only = [LayerRun(10, OPTIONS[:1])]
    chosen, short = leave_room_for_graphs(choose(only, 1040), only, 1040, 0, 200.0)
    assert chosen.peak == 1000 and short


@pytest.mark.parametrize("nbytes, needed, dropped", [(150, 1000, False), (250, 1000, True), (0, 2000, False)])
def test_what_is_in_the_way_of_another_shape_is_dropped(nbytes, needed, dropped):
    made = recordings(nbytes=nbytes)
    assert made.make_way(needed, 1200) == dropped == bool(made.dropped) and made.bytes == (0 if dropped else nbytes)


def admitted(choice, room, tail=0):
    return AdmittedPlan(8, 0, room, choice, 0, True, 0.0, False, recorded_step(choice.options, tail))


def allowed(choice, room, dropped=0, tail=0):
    """What recordings may take beside this choice."""
    made = recordings()
    made.dropped = dropped
    made.allow(admitted(choice, room, tail))
    return made.replays.allowance


def test_layers_that_are_all_recorded_need_what_recordings_hold_and_what_is_beside():
    """Half of the room would not do for half of the layers, whose scratch would be there twice."""
    layer = PlanOption(KEEP, 20, 100, 300, 0.0, gradients=10, passed=10)
    whole = recorded_step([[layer] * 10], 0)
    assert (whole.scratch, whole.saved, whole.beside) == (300, 100, 110 + 40) and whole.bytes == 440 + 150
    allowance = allowed(choose([LayerRun(10, (layer,))], 600), 600)
    assert allowance.admits(0, 0) and allowance.admits(310, 1) and allowance.admits(430, 10)
    assert allowance.admits(359, 1) and not allowance.admits(360, 1), (
        "more than 90 for those that follow, and 150 beside"
    )
    assert not allowance.admits(450, 10), "nothing is left for what is beside"
    assert not allowed(choose([LayerRun(10, (layer,))], 550), 550).admits(0, 0)
    assert not allowed(choose([LayerRun(10, (layer,))], 600), 600, dropped=MAX_DROPPED).admits(0, 0)


def test_what_is_recorded_needs_its_share_of_the_step_no_more():
    """Where not all can be: recordings take more than was expected."""
    allowance = allowed(choose(STACKS, 1050), 1200)
    assert allowance.admits(taken=199, recorded=0) and not allowance.admits(taken=200, recorded=0)
    assert allowance.admits(taken=699, recorded=5) and not allowance.admits(taken=700, recorded=5)
    assert allowance.admits(taken=1199, recorded=10) and not allowance.admits(taken=1200, recorded=20)
    # a step of another shape may come again, and finds nothing recorded
    assert not allowed(choose(STACKS, 1050), 1200, dropped=MAX_DROPPED).admits(taken=690, recorded=5)


def test_recordings_that_were_in_the_way_too_often_are_made_only_beside_a_whole_step():
    """Under the plan that stays, too: they would be made and dropped without end."""
    made = recordings()
    made.allow(admitted(choose(STACKS, 1050), 1200))
    for number in range(MAX_DROPPED):
        assert made.replays.allowance.admits(taken=690, recorded=5) and made.dropped == number
        made.replays.bytes = 690
        assert made.make_way(1000, 1200)
    assert not made.replays.allowance.admits(taken=690, recorded=5)


def test_beside_copies_to_the_host_nothing_is_recorded():
    assert not allowed(choose(STACKS, 300), 300).admits(0, 0) and allowed(choose(STACKS, 300), 300).room == 0
    assert [recordings(nbytes).forget() for nbytes in (0, 1)] == [False, True]
    made = recordings(nbytes=50)
    made.allow(admitted(choose(STACKS, 1050), 1200))
    assert made.bytes == 50
    made.allow(admitted(choose(STACKS, 300), 300))
    assert made.bytes == 0, "a plan that keeps the same values, on the host, runs the graphs that are recorded"


def test_what_inputs_are_copied_to_is_of_recordings_too():
    """It stays from step to step, and else would count as others' memory, for which plans are made anew."""
    made = recordings(nbytes=150)
    made.replays.buffers.nbytes, made.replays.saved_bytes = 60, lambda: 30
    assert (made.bytes, made.saved) == (210, 90)
    assert made.make_way(1000, 1200) and (made.bytes, made.saved) == (0, 30)


@pytest.mark.parametrize(
    "sizes, weighed",
    [
        ([8, 8, 8], True),
        ([8, 8], False),
        ([8, 8, 8, 8, 3], True),  # the last batch of the data is smaller
        ([8, 6, 7, 8, 6, 7], False),
        ([8, 8, 6, 6, 7, 7], False),  # half of the steps would run unrecorded, and record
    ],
)
def test_no_plan_is_weighed_for_recordings_where_sizes_change(sizes, weighed):
    made = recordings()
    made.replays.saving = lambda tokens: 40.0 + tokens
    for tokens in sizes:
        made.begin(tokens)
        assert made.replays.tokens == tokens
    assert made.saving(8) == (48.0 if weighed else 0.0)


def test_recordings_of_plans_that_are_followed_no_more_are_dropped():
    made = recordings(nbytes=50)
    made.forget()
    assert made.bytes == 0
    Recordings(None, torch.device("cpu")).forget()
