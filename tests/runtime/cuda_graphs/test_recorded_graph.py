"""Graphs that are timed and recorded, call by call: of functions that a test gives. No model runs."""

import pytest
import torch

from tests.support.memory.cpu_recorder import CpuRecorder
from tunecompile.runtime.cuda_graphs import launch_bound, recording, replay
from tunecompile.runtime.cuda_graphs.allowance import Allowance
from tunecompile.runtime.cuda_graphs.pool import MAX_TRIES


def test_an_input_that_is_the_same_under_one_shape_alone_is_copied():
    """A table of each length, say: at another shape's call it is another object."""
    replays = replay.GraphReplays(CpuRecorder())
    weight, tables = torch.ones(3), {n: torch.full((n, 3), float(n)) for n in (2, 4, 6)}
    graph = replays.forward(lambda inputs: [inputs[0] * inputs[1] + inputs[2]], handed=1, parameters=[0])
    for n in (2, 4, 6, 6, 6):
        place = graph._place((n,), [weight, tables[n], torch.ones(n, 3), n])
    assert place.layer.fixed() == {0} and place.layer.calls == 5 and place.seen == 3


def test_whether_the_last_forwards_launches_are_waited_for_is_told_once():
    """Of a forward that is not recorded, nothing is known: what another one told would be taken for it."""
    replays = replay.GraphReplays(CpuRecorder())
    graph = replays.forward(lambda inputs: [inputs[0] * inputs[1]], handed=1, parameters=[0])
    assert replays.last_waits() is None
    for waiting in (None, True, False):
        graph.clocks[4,] = clock = launch_bound.Clock(replays.recorder, True, 0, replays.copying)
        clock.waiting = waiting
        graph([torch.ones(3), torch.ones(4, 3), 4])
        assert replays.last_waits() is waiting and replays.last_waits() is None


def test_what_is_saved_is_summed_over_all_layers_of_a_further_shape():
    """Also where nothing may be recorded: a plan that copies to the host is weighed against one that leaves room. A further shape's
    clock knows in the middle of its first pass."""
    replays, weights = replay.GraphReplays(CpuRecorder()), [torch.ones(3) for _ in range(8)]
    replays.allowance = Allowance(0, 100, 8, True)
    graph = replays.forward(lambda inputs: [inputs[0] * inputs[1]], handed=1, parameters=[0])
    for replays.tokens in (6, 7):
        for weight in weights:
            graph([weight, torch.ones(replays.tokens, 3), replays.tokens])
        replays.passes += 1
    clock = graph.clocks[7,]
    assert clock.waiting and clock.known and 0 < replays.saving(7) == pytest.approx(8 * clock.saving(7))
    replays.forget()
    assert replays.saving(8) > 0, "what is known of other batches"
    graph.clocks[8,] = launch_bound.Clock(replays.recorder, True, 8, replays.copying)
    graph.clocks[8,].waiting = False
    assert replays.saving(8) == 0 < replays.saving(7)


def test_an_expanded_input_does_not_empty_the_allocators_cache():
    """Such a layer is never recorded, and the cache would be emptied at each of its calls under a budget."""
    replays = replay.GraphReplays(CpuRecorder())
    replays.allowance = Allowance(1000, 100, 1, True)
    graph = replays.forward(lambda inputs: [inputs[0] * inputs[1]], handed=1, parameters=[0])
    weight = torch.ones(3)
    for _ in range(12):
        graph([weight, torch.ones(1, 3).expand(4, 3), 4])
        replays.passes += 1
    assert graph.clocks[4,].waiting and not replays.recorder.releases and not replays.recorded


def test_a_plan_without_room_is_not_asked_again():
    """Each layer's call would count the recordings of all layers, and ask the allocator."""
    replays = replay.GraphReplays(CpuRecorder())
    replays.allowance = Allowance(0, 100, 4, True)
    asked = replays.recorder.taken
    assert not replays.room([torch.ones(1)]) and replays.recorder.taken == asked
    replays.bytes = 10  # what is recorded is replayed
    assert not replays.room([torch.ones(1)]) and replays.recorder.taken == asked
    replays.allowance = Allowance(1000, 100, 4, True)
    assert replays.room([torch.ones(1)])
    replays.allowance = Allowance(50, 100, 4, True)
    assert not replays.room([torch.ones(1)]), "less than the step needs beside them"


@pytest.mark.parametrize("taken, asked", [(99, 1), (100, 0), (101, 0)])
def test_layers_are_counted_only_where_there_is_room(monkeypatch, taken, asked):
    replays, counted = replay.GraphReplays(CpuRecorder()), []
    monkeypatch.setattr(replays, "_layers", lambda: counted.append(1) or 4)
    replays.allowance, replays.bytes = Allowance(100, 0, 4, True), taken
    assert replays._admitted() is bool(asked) and len(counted) == asked


def replayed(steps: int):
    """(What they share, a forward, its backward, the inputs that their last calls were given) after some steps."""
    replays = replay.GraphReplays(CpuRecorder())
    forward = replays.forward(lambda inputs: [inputs[0] * 2, inputs[0] + 1], handed=1)
    backward = replays.backward(lambda inputs: [inputs[0] * inputs[1]])
    for _ in range(steps):
        made, saved = forward(given := [torch.ones(3)])
        (gradient,) = backward(grad := [saved, torch.ones(3)])
        assert torch.equal(made, torch.full((3,), 2.0)) and torch.equal(gradient, torch.full((3,), 2.0))
        del saved
    return replays, forward, given, grad


def test_what_a_replayed_call_was_given_is_let_go():
    """As a compiled graph lets go of its inputs: whoever calls it holds the list until it returns."""
    replays, _, given, grad = replayed(12)
    assert replays.recorded == 2 and not given and not grad


def test_layers_in_another_order_are_recorded_a_few_times(monkeypatch):
    replays, forward, *_ = replayed(12)
    monkeypatch.setattr(forward.pool, "in_order", lambda recording: False)
    for _ in range(MAX_TRIES + 2):
        forward([torch.ones(3)])
    assert replays.recorded == 1 + MAX_TRIES, "the backward, and the forward again and again"


def test_no_recording_is_replayed_while_a_later_one_is_needed():
    """Its scratch may be where the later one has saved values, as the stand-in shows."""
    replays = replay.GraphReplays(CpuRecorder())
    graph = replays.forward(lambda inputs: [inputs[0] * 2, inputs[0] + 1], handed=1)
    first, second = (replays.record(graph, graph.pool, [torch.zeros(3)], set(), 1) for _ in range(2))
    assert graph.pool.in_order(first) and graph.pool.in_order(second)
    _, saved = second.replay([torch.ones(3)])
    graph.pool.flying.append(second)
    pending = torch.ones(3, requires_grad=True) * saved  # for whose backward it is kept
    assert torch.equal(saved, torch.full((3,), 2.0))
    assert not graph.pool.in_order(first) and not graph.pool.in_order(second)
    first.replay([torch.ones(3)])
    assert saved.isnan().all()
    del pending, saved
    assert graph.pool.in_order(first)


@pytest.mark.parametrize(
    "lengths, total, allowance, shapes",
    [
        ([4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 9], 4_000, None, 0),
        ([4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 9], 40_000, None, 5),
        ([4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 9], 4_000, Allowance(10_000, 100, 8, True), 5),
        ([4, 5, 4, 5, 4, 5], 4_000, None, 2),
        ([4, 4, 4, 4], 4_000, None, 1),
    ],
)
def test_what_saves_much_is_recorded_where_most_calls_are_of_its_shape(lengths, total, allowance, shapes):
    """Each other call would need as much beside. What is handed on, or is an input, is not saved. (The first size of all is known a
    pass later.)"""
    recorder = CpuRecorder()
    recorder.total = total
    replays, weights = replay.GraphReplays(recorder), [torch.ones(3) for _ in range(8)]
    replays.allowance = allowance
    graph = replays.forward(
        lambda inputs: [inputs[0] * inputs[1], inputs[1] + 1, inputs[1] + 2, inputs[0]], handed=1, parameters=[0]
    )
    for length in lengths:
        for weight in weights:
            graph([weight, torch.ones(length, 3), length])
        replays.passes += 1
    assert len(graph.pool.shapes) == shapes
    assert all(clock.saved == 2 * 4 * 3 * length for (length,), clock in graph.clocks.items())


def test_copies_of_all_sizes_and_dtypes():
    """Small ones of a dtype are joined, a large one has a launch of its own."""
    torch.manual_seed(0)
    large = recording.LARGE // 4
    sources = [
        torch.randn(n, dtype=dtype) for n in (3, large - 1, large, 5) for dtype in (torch.float32, torch.bfloat16)
    ]
    targets = [torch.zeros_like(each) for each in sources]
    recording.copy_all(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources))
