"""What CUDA graphs may take of a budget: plans are given, and so is what launches take."""

import types

import pytest
import torch

from tunecompile.memory.planner import KEEP, Option, Plan, Stack, choose
from tunecompile.memory.recordings import Recordings

OPTIONS = (Option(KEEP, 100, 0, 0, 0.0), Option(Plan(None), 20, 0, 0, 1.0), Option(KEEP, 0, 0, 0, 0.5, offloaded=100))
STACKS = [Stack(10, OPTIONS)]


class Fake(types.SimpleNamespace):
    """Recordings that hold so many bytes, of layers whose launches take so many milliseconds."""

    recorder = types.SimpleNamespace(device="cpu")
    most = None

    def launching(self):
        return self.ms

    def forget(self):
        self.bytes = 0


def recordings(ms=0.0, nbytes=0):
    return Recordings(Fake(ms=ms, bytes=nbytes), torch.device("cpu"))


def weighed(ms, room=1200, computing=0.0):
    made = recordings(ms)
    chosen = made.weigh(choose(STACKS, room), STACKS, room, 0, computing)
    return made, chosen


def test_a_smaller_plan_is_worth_what_it_computes_again_or_is_not():
    """Half the room takes five layers that compute again: 5 ms. All is recorded then, where a fifth was before."""
    made, chosen = weighed(ms=100.0)
    assert chosen.fits and 2 * chosen.peak <= 1200 and chosen.ms >= 5 and not made.short
    for ms in (0.0, 2.0):
        assert weighed(ms)[1] == choose(STACKS, 1200)


def test_launches_that_take_no_longer_than_what_they_launch_save_nothing():
    assert weighed(100.0, computing=100.0)[1] == choose(STACKS, 1200)


def test_what_is_recorded_stays_on_the_device():
    _, chosen = weighed(100.0, room=700)
    assert choose(STACKS, 700).offloads and not chosen.offloads and chosen.peak < 700


def test_no_smaller_plan_is_known():
    only = [Stack(10, OPTIONS[:1])]
    made = recordings(100.0)
    assert made.weigh(choose(only, 1200), only, 1200, 0, 0.0).peak == 1000 and made.short


@pytest.mark.parametrize("nbytes, shape_changed, kept", [(150, False, True), (250, False, False), (150, True, False), (0, True, True)])
def test_what_no_longer_fits_is_dropped(nbytes, shape_changed, kept):
    made = recordings(nbytes=nbytes)
    dropped = made.allow(choose(STACKS, 1200), 1200, shape_changed)
    assert dropped != kept and made.replays.most == 200 and made.bytes == (nbytes if kept else 0)


def test_beside_copies_to_the_host_nothing_is_recorded():
    made = recordings(nbytes=10)
    assert made.allow(choose(STACKS, 300), 300, False) and made.replays.most == 0
