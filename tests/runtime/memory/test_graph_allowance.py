"""What CUDA graphs may take of a budget: plans are given, and so is what launches take."""

import types

import pytest
import torch

from tunecompile.planner.solver import KEEP, LayerRun, Plan, PlanOption, choose
from tunecompile.planner.step_plan import RECORDED, leave_room_for_graphs
from tunecompile.runtime.memory.graph_allowance import MAX_DROPPED, Recordings

OPTIONS = (
    PlanOption(KEEP, 100, 0, 0, 0.0),
    PlanOption(Plan(None), 20, 0, 0, 1.0),
    PlanOption(KEEP, 0, 0, 0, 0.5, offloaded=100),
)
STACKS = [LayerRun(10, OPTIONS)]


class Fake(types.SimpleNamespace):
    """Recordings that hold so many bytes, of layers whose launches take so many milliseconds."""

    recorder = types.SimpleNamespace(device="cpu")
    allowance = None

    def launching(self):
        return self.ms

    def forget(self):
        self.bytes = 0


def recordings(ms=0.0, nbytes=0):
    return Recordings(Fake(ms=ms, bytes=nbytes), torch.device("cpu"))


def weighed(ms, room=1200, computing=0.0):
    """The choice, and whether it is short of room for recordings."""
    return leave_room_for_graphs(choose(STACKS, room), STACKS, room, 0, 2 * (ms - computing))


def test_a_smaller_plan_is_worth_what_it_computes_again_or_is_not():
    """Of ten layers, three compute again to make room for all recordings: 3 ms. 200 of 1,000 bytes are free beside those that keep everything."""
    chosen, short = weighed(ms=100.0)
    assert chosen.fits and RECORDED * chosen.peak <= 1200 and chosen.ms == 3 and not short
    for ms in (0.0, 2.0):
        assert weighed(ms)[0] == choose(STACKS, 1200)


def test_launches_that_take_no_longer_than_what_they_launch_save_nothing():
    assert weighed(100.0, computing=100.0)[0] == choose(STACKS, 1200)


def test_what_is_recorded_stays_on_the_device():
    chosen, _ = weighed(100.0, room=700)
    assert choose(STACKS, 700).offloads and not chosen.offloads and chosen.peak < 700


def test_no_smaller_plan_is_known():
    only = [LayerRun(10, OPTIONS[:1])]
    chosen, short = leave_room_for_graphs(choose(only, 1200), only, 1200, 0, 200.0)
    assert chosen.peak == 1000 and short


@pytest.mark.parametrize("nbytes, needed, dropped", [(150, 1000, False), (250, 1000, True), (0, 2000, False)])
def test_what_is_in_the_way_of_another_shape_is_dropped(nbytes, needed, dropped):
    made = recordings(nbytes=nbytes)
    assert made.make_way(needed, 1200) == dropped == bool(made.dropped) and made.bytes == (0 if dropped else nbytes)


def test_what_is_recorded_needs_its_share_of_the_step_no_more():
    made = recordings()
    made.allow(choose(STACKS, 1200), 1200)
    allowance = made.replays.allowance
    assert allowance.admits(taken=190, recorded=0) and not allowance.admits(taken=200, recorded=0)
    assert (
        allowance.admits(taken=690, recorded=5)
        and allowance.admits(taken=1190, recorded=10)
        and not allowance.admits(taken=1200, recorded=20)
    )
    made.dropped = MAX_DROPPED  # a step of another shape may come again, and finds nothing recorded
    made.allow(choose(STACKS, 1200), 1200)
    assert not made.replays.allowance.admits(taken=690, recorded=5)


def test_beside_copies_to_the_host_nothing_is_recorded():
    made = recordings()
    made.allow(choose(STACKS, 300), 300)
    assert not made.replays.allowance.admits(0, 0)
