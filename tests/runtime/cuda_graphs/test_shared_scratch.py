"""Forwards and backwards of a compiled layer have their scratch in one memory, and nothing that is needed lies there.

The stand-in for CUDA graphs overwrites at each replay what another recording of its pool may have under it.
"""

import gc
import weakref

import pytest
import torch

from tests.support.memory.cpu_recorder import CpuRecorder
from tunecompile.runtime.cuda_graphs import launch_bound, replay
from tunecompile.runtime.cuda_graphs.allowance import Allowance


class Layers:
    """Layers that compute x * weight, and save x + 1 for a backward that multiplies it with the gradient."""

    def __init__(self, monkeypatch, lengths=(6,)):
        monkeypatch.setattr(launch_bound, "SAMPLES", 1)
        monkeypatch.setattr(launch_bound.Clock, "decide", lambda self: True)
        self.replays = replay.GraphReplays(CpuRecorder())
        self.forward = self.replays.forward(lambda given: [given[0] * given[1], given[1] + 1], handed=1, parameters=[0])
        self.backward = self.replays.backward(lambda given: [given[0] * given[1]])
        self.weights = {name: torch.full((3,), float(number)) for number, name in enumerate("abcd", 2)}

    def run(self, name, length=6):
        """(What it gave, what it saved) of ones."""
        return self.forward([self.weights[name], torch.ones(length, 3), length])

    def back(self, saved):
        """Whether a recording was replayed; the result is checked."""
        before = len(played)
        (found,) = self.backward([saved, torch.full_like(saved, 5.0)])
        assert torch.equal(found, torch.full_like(found, 10.0)), found
        return len(played) > before

    def step(self, name, length=6):
        out, saved = self.run(name, length)
        assert torch.equal(out, torch.ones(length, 3) * self.weights[name])
        return self.back(saved)

    def recordings(self, length=6):
        return [place.recording for key, place in self.forward.places.items() if key[0] == (length,)]


played = []


@pytest.fixture
def layers(monkeypatch):
    played.clear()
    inner = replay.Recording.replay
    monkeypatch.setattr(replay.Recording, "replay", lambda self, given: played.append(self) or inner(self, given))
    return Layers(monkeypatch)


def test_a_layer_has_one_memory_for_both(layers):
    assert [layers.step("a") for _ in range(5)] == [False, False, True, True, True]
    assert list(layers.replays.recorder.pools) == [layers.forward.pool.number]
    (forward,) = layers.recordings()
    assert forward.backward.pool is layers.forward.pool and forward.backward.number > forward.number


def test_a_backward_is_not_replayed_over_what_a_later_forward_saved(layers):
    """The first layer's graph is kept while a second layer is recorded, and both backwards are still to come."""
    for _ in range(4):
        layers.step("a")
    for _ in range(2):
        layers.run("b")
    _, first = layers.run("a")
    _, second = layers.run("b")  # recorded behind the first layer's backward
    pending = torch.ones(3, requires_grad=True) * second  # for whose backward it is kept
    assert len(layers.recordings()) == 2 and all(layers.recordings())
    assert not layers.back(first), "it would write over what the second has saved"
    assert torch.equal(second, torch.full_like(second, 2.0)) and layers.back(second)
    del first, second, pending
    for name in "abab":
        assert layers.step(name)


def test_a_backward_is_not_recorded_over_what_its_own_forward_saved(layers):
    """Which was given back to the pool, as another shape was recorded before any room was left for this backward."""
    room = replay.GraphReplays.room
    layers.replays.room = lambda given: len(given) == 3  # forwards alone
    for length in (8, 6):
        for _ in range(3):
            layers.step("a", length)
    del layers.replays.room
    assert layers.replays.room.__func__ is room and layers.forward.pool.holds == (6,)
    for _ in range(3):
        assert not layers.step("a", 8), "it runs"
    assert layers.step("a", 6)
    (eight,), (six,) = layers.recordings(8), layers.recordings(6)
    assert eight.backward is None and six.backward is not None


def test_backwards_of_several_shapes_take_turns(layers):
    for _ in range(2):
        for length in (8, 6):
            for _ in range(4):
                layers.step("a", length)
    for length in (6, 8, 6, 6, 8):
        assert layers.step("a", length)


def test_memory_is_counted_until_nothing_of_a_pool_is_left(layers):
    """What is recorded anew takes nothing more from the device: the others have kept the pool. The stand-in takes 100 for each."""
    for _ in range(4):
        layers.step("a")
        layers.step("b")
    pool, (first, second) = layers.forward.pool, layers.forward.places.values()
    assert layers.replays.bytes == pool.bytes == 400 and layers.replays.recorded == 4
    assert layers.replays.saved_bytes() == 2 * 6 * 3 * 4, "what both save: scratch is no tensor's"
    # a forward copies x; a backward the gradient, and its weight is what the forward saved
    assert layers.replays.buffers.nbytes == 2 * 6 * 3 * 4
    pool.drop(first)
    assert layers.replays.bytes == 400 and layers.replays.saved_bytes() == 6 * 3 * 4
    pool.drop(second)
    assert layers.replays.bytes == pool.bytes == 0 == layers.replays.saved_bytes()
    layers.replays.forget()
    assert layers.replays.buffers.nbytes == 0


@pytest.mark.parametrize("how", ["forget", "drop"])
def test_what_is_dropped_is_free_at_once(layers, how):
    """Without the collector of cycles: a full device needs its memory now. What a pending backward needs stays."""
    for _ in range(4):
        for name in "ab":
            layers.step(name)
    _, saved = layers.run("a")
    pending = torch.ones(3, requires_grad=True) * saved
    first, second = map(weakref.ref, layers.recordings())
    backwards = [weakref.ref(made().backward) for made in (first, second)]
    played.clear()
    layers.replays.recorder.given_back.clear()  # which the stand-in keeps
    gc.disable()
    try:
        if how == "forget":
            layers.replays.forget()
            assert first() is None and backwards[0]() is None
        else:
            layers.forward.pool.drop(layers.forward.places[(6,), layers.weights["b"].data_ptr()])
        assert second() is None and backwards[1]() is None
    finally:
        gc.enable()
    assert not pending.isnan().any() and torch.equal(saved, torch.full_like(saved, 2.0))


def test_what_python_holds_for_a_backward_is_not_overwritten(layers):
    """As under a checkpoint around several layers: autograd has none of these values."""
    for _ in range(4):
        layers.step("a")
    _, kept = layers.run("a")
    layers.forward([layers.weights["a"], torch.full((6, 3), 7.0), 6])
    assert torch.equal(kept, torch.full_like(kept, 2.0)) and layers.back(kept)


def test_what_another_shape_gave_back_is_no_tensors(layers):
    for length in (8, 6):
        for _ in range(4):
            layers.step("a", length)
    assert all(layers.recordings(8)) and layers.replays.saved_bytes() == 6 * 3 * 4


def test_caches_are_given_back_before_a_recording_is_measured(layers):
    """Once. A question whether there is room has no such effect."""
    layers.replays.allowance = Allowance(1000, 100, 2, True)
    recorder, order = layers.replays.recorder, []
    release, memory, record = recorder.release, recorder.memory, recorder.record
    recorder.release = lambda: order.append("release") or release()
    recorder.memory = lambda device: order.append("memory") or memory(device)
    recorder.record = lambda *given: order.append("record") or record(*given)
    assert layers.replays.room([torch.ones(1)]) and order == ["memory"]
    order.clear()
    for _ in range(4):
        layers.step("a")
    assert order == [
        *("memory", "release", "memory", "record", "memory"),  # room; before and after
        *("memory", "memory", "record", "memory"),
    ]


def test_what_a_graph_hands_through_is_the_callers_own():
    """Its input itself, and a view of it: no copy, and not the recording's buffer, into which the next input is written."""
    given, weight = torch.arange(6.0), torch.ones(2)
    owner = replay.GraphReplays(CpuRecorder())
    graph = owner.forward(lambda inputs: [inputs[0], inputs[0][2:4], inputs[1] * 2], handed=3)
    made = owner.record(graph, graph.pool, [given, weight], {1}, 3)
    assert made is not None and made.passed == {0: 0, 1: 0}
    whole, part, double = made.replay([given, weight])
    assert whole.data_ptr() == given.data_ptr() and part.data_ptr() == given[2:].data_ptr()
    assert torch.equal(whole, given) and torch.equal(part, given[2:4])
    later = torch.arange(6.0) + 10
    again, *_ = made.replay([later, weight])
    assert (
        again.data_ptr() == later.data_ptr()
        and torch.equal(whole, torch.arange(6.0))
        and torch.equal(double, 2 * weight)
    )


@pytest.mark.parametrize(
    "part",
    [lambda base: base[3:], lambda base: base[:, 1], lambda base: base[2:, 1:3].t(), lambda base: base[1::2]],
    ids=["later rows", "a column", "turned", "every other row"],
)
def test_slices_are_handed_through_where_they_lie(part):
    """Inputs that are parts of larger tensors, each call's at another place: what is handed through is of that place."""
    weight, owner = torch.ones(1), replay.GraphReplays(CpuRecorder())
    graph = owner.forward(lambda inputs: [inputs[0], inputs[0][1:], inputs[0][-1], inputs[0] * inputs[1]], handed=4)
    bases = [torch.arange(24.0).view(6, 4) + 100 * number for number in range(3)]
    made = owner.record(graph, graph.pool, [part(bases[0]), weight], {1}, 4)
    assert made is not None and made.passed == {0: 0, 1: 0, 2: 0}
    for base in bases:
        given = part(base)
        whole, rest, last, product = made.replay([given, weight])
        for found, right in ((whole, given), (rest, given[1:]), (last, given[-1])):
            assert found.equal(right) and found.data_ptr() == right.data_ptr()
        assert product.equal(given)
