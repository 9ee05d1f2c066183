"""Replayed layers give what unrecorded ones give, whatever the loop keeps, repeats or leaves out.

On a CPU a recorder stands in that does again, in place, what it was given: all but the device's own part is the real thing.
"""

import copy
import gc
import weakref

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.memory.cpu_recorder import CpuRecorder
from tests.support.models.pairs import attending, of_plain_layers
from tests.support.notes import find, has
from tests.support.stacks import once, same
from tunecompile.runtime.cuda_graphs import recorded_graph, replay, stacks
from tunecompile.runtime.model_state import state_of

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def adapted(model, *modules):
    return zoo.adapt(model, target_modules=list(modules)).train()


@pytest.fixture(autouse=True)
def layers_alone(monkeypatch):
    """Layers are recorded one by one: all of them together are tests of test_stacks.py."""
    monkeypatch.setattr(stacks, "MAX_BROKEN", 0)


@pytest.fixture
def pair(on_cpu):
    """(optimized with a recorder for CPUs, as it was)"""
    reference = adapted(of_plain_layers(num_hidden_layers=3), "inner")
    return tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference


def recorded(model) -> int:
    return state_of(model).replays.recorded


def warm(model, steps: int = 5, **batch) -> int:
    for step in range(steps):
        once(model, **{"seed": step, **batch})
    model.zero_grad(set_to_none=True)
    return recorded(model)


@pytest.mark.usefixtures("pair")
def test_every_step_is_right_before_while_and_after_recording():
    reference = adapted(attending(num_hidden_layers=3), "q_proj", "v_proj")
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for seed in range(8):
        same((model, reference), lambda m: once(m, seed=seed))
    assert recorded(model) == 6, tunecompile.report(model).notes  # three layers, forward and backward
    assert has(model, "cuda-graphs", count=6)


def test_three_steps_are_enough(monkeypatch):
    """Of another shape, too, and after the memory was given back."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    reference = adapted(of_plain_layers(num_hidden_layers=6), "inner")
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    assert warm(model, steps=3) == 12
    assert warm(model, steps=3, length=12) == 24
    tunecompile.free(model)
    assert state_of(model).replays.bytes == 0 and warm(model, steps=3, length=12) == 36
    same((model, reference), lambda m: once(m, length=12))


def test_restore_gives_the_memory_back_at_once(monkeypatch):
    """Not when Python collects cycles: a plan for what comes next would count it as another's."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    model = tunecompile.optimize(adapted(of_plain_layers(num_hidden_layers=3), "inner"), executor="eager")
    assert warm(model) == 6
    graphs = state_of(model).replays.graphs
    recordings = [weakref.ref(place.recording) for graph in graphs for place in graph.places.values()]
    gc.collect()
    gc.disable()
    try:
        assert len(recordings) == 3 and all(recording() is not None for recording in recordings)
        tunecompile.restore(model)
        assert all(recording() is None for recording in recordings)
    finally:
        gc.enable()


def test_a_further_shape_is_recorded_when_it_comes_again(pair):
    """What a layer's inputs are is known by then, and its kernels are loaded: sizes that come in turn would be recorded a round later.
    A shape that came once may be no more."""
    model, reference = pair
    lengths = [16, 8, 8, 8, 12, 9, 10]  # the first has a graph of its own; 8 is recorded at its third call
    counts = []
    for seed, length in enumerate([*lengths, 10, 9, 11]):
        same((model, reference), lambda m: once(m, seed=seed, length=length))
        counts.append(recorded(model))
    assert counts == [0, 0, 0, 6, 6, 6, 6, 12, 18, 18]


@pytest.mark.parametrize("computing, known", [(0.0, [None, True]), (1e6, [False, False])])
def test_the_first_step_does_not_tell_that_the_host_is_waited_for(pair, monkeypatch, computing, known):
    """It compiles, loads and looks around while layers are launched: a step that computes three times as long was recorded on a busy host."""
    model, _ = pair
    monkeypatch.setattr(CpuRecorder, "elapsed", lambda self, begin, end: computing)
    found = []
    for seed in range(2):
        once(model, seed=seed)
        (clock,) = [clock for graph in state_of(model).replays.graphs for clock in graph.clocks.values()]
        clock.decide()
        found.append(clock.waiting)
    assert found == known


def test_layers_are_recorded_in_the_order_they_run(pair, monkeypatch):
    """Saved values may lie in earlier recordings' scratch: whatever runs between a layer's forward and its backward must have been
    recorded after it. Here the first layer, which has a graph of its own, is ready later than the others."""
    model, _ = pair
    replayed, asked, may = [], [], recorded_graph.Forward._may_record

    def late(self, *call):
        asked.append(self)
        return may(self, *call) and (self is not asked[0] or asked.count(self) > 3)

    monkeypatch.setattr(recorded_graph.Forward, "_may_record", late)
    inner = replay.Recording.replay

    def watch(self, inputs):
        replayed.append(self)
        return inner(self, inputs)

    monkeypatch.setattr(replay.Recording, "replay", watch)
    warm(model, steps=12)
    once(model)
    step = [r for r in replayed if r.saved][-3:]  # the last step's forwards
    assert [r.number for r in step] == sorted(r.number for r in step) and len({r.number for r in step}) == 3


def both(m, first, second):
    a, b = m(**zoo.batch(seed=1, length=first)).loss, m(**zoo.batch(seed=2, length=second)).loss
    (a + 2 * b).backward()


def of_two_shapes(model):
    """The graph for any size, recorded with 12 tokens and then with 8; the first shape has one of its own."""
    for length, steps in ((16, 1), (12, 4), (8, 4)):
        warm(model, steps, length=length)
    (graph,) = [graph for graph in state_of(model).replays.graphs if len(graph.pool.shapes) == 2]
    return graph


def test_shapes_share_their_memory(pair):
    """What one has saved is given back for the next one's recordings; one of them is in use at a time."""
    model, reference = pair
    graph = of_two_shapes(model)
    first = [place.recording for key, place in graph.places.items() if key[0] != graph.pool.holds]
    given_back = state_of(model).replays.recorder.given_back
    assert len(first) == 3 and all(r.saved_at() <= given_back.keys() for r in first) and recorded(model) == 12
    # what a pending backward needs outlives recordings that are dropped meanwhile
    assert all(given_back[address] is r.play for r in first for address in r.saved_at())
    for length in (12, 8, 12, 12, 8):
        same((model, reference), lambda m: once(m, length=length))
    same((model, reference), lambda m: both(m, 12, 8))
    same((model, reference), lambda m: both(m, 8, 12))
    assert recorded(model) == 12
    assert [r.number for r in graph.pool.flying] == sorted(r.number for r in graph.pool.flying)
    owners = graph.shared.owners  # on a GPU values of several shapes have one address
    owners.update(dict.fromkeys(owners))
    once(model, length=12)
    assert all(owners[address] is recording for recording in first for address in recording.saved_at())


def test_layers_of_an_earlier_shape_are_recorded_anew_together(pair):
    """Other shapes may lie over what they save by now: one layer alone cannot be recorded among them."""
    model, reference = pair
    graph = of_two_shapes(model)
    earlier = [place for key, place in graph.places.items() if key[0] != graph.pool.holds]
    graph.pool.drop(earlier[1])
    same((model, reference), lambda m: once(m, length=12))
    assert not any(place.recording for place in earlier) and recorded(model) == 12
    for length in (12, 8, 12):
        same((model, reference), lambda m: once(m, length=length))
    assert all(place.recording for place in earlier) and recorded(model) == 18


def test_a_larger_shape_has_all_shapes_recorded_anew(pair):
    """Blocks of memory that smaller tensors left are not joined: each larger shape would take memory of its own."""
    model, reference = pair
    for length, steps in ((16, 1), (8, 4), (12, 4)):
        warm(model, steps, length=length)
    replays = state_of(model).replays
    assert recorded(model) == 12 and replays.bytes == 6 * 100 and replays.recorder.releases == 1
    for length in (8, 12, 8, 12):
        same((model, reference), lambda m: once(m, length=length))
    assert recorded(model) == 18 and replays.bytes == 12 * 100 and replays.recorder.releases == 1


@pytest.mark.parametrize("length", [16, 12], ids=["recorded", "new"])
def test_forwards_without_gradients_are_neither_recorded_nor_replayed(pair, length, monkeypatch):
    """Scores run by the code that trains. No backward follows, for which a recording would hold what is saved."""
    model, _ = pair
    before, played = warm(model, length=16), []
    inner = replay.Recording.replay
    monkeypatch.setattr(replay.Recording, "replay", lambda self, given: played.append(self) or inner(self, given))
    words = zoo.batch(length=length)["input_ids"]
    for _ in range(5):
        with torch.no_grad():
            found, right = (m(words, use_cache=False).logits for m in pair)
            assert torch.allclose(found, right, atol=1e-5)
    assert recorded(model) == before == 6 and not played
    same(pair, lambda m: once(m, length=16))


def test_a_call_that_cannot_be_recorded(pair, monkeypatch):
    model, reference = pair

    def fail(self, run, pool, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CpuRecorder, "record", fail)
    for seed in range(5):
        same((model, reference), lambda m: once(m, seed=seed))
    assert has(model, "no-cuda-graph", detail="not permitted") and not recorded(model)


@pytest.mark.parametrize("full", [1, 2])
def test_memory_that_the_allocator_holds_is_freed_where_a_recording_lacks_it(full, pair, monkeypatch):
    """Batches of many sizes leave blocks that no recording may use; a graph whose second try fails, too, runs as it
    did."""
    model, reference = pair
    tries, plain = [], CpuRecorder.record

    def record(self, run, pool, device):
        tries.append(self.releases)
        if len(tries) <= full:
            raise torch.OutOfMemoryError("no room")
        return plain(self, run, pool, device)

    monkeypatch.setattr(CpuRecorder, "record", record)
    warm(model)
    assert tries[:2] == [0, 1] and state_of(model).replays.recorder.releases == 1
    assert (recorded(model) == 6) is (full == 1) and has(model, "no-cuda-graph", detail="no room") is (full == 2)
    same((model, reference), once)


def test_kernels_that_do_not_wait_are_not_recorded(pair, monkeypatch):
    monkeypatch.setattr(CpuRecorder, "elapsed", lambda self, begin, end: 1e9)
    assert warm(pair[0]) == 0


def test_recordings_take_a_share_of_the_memory_at_most(monkeypatch, pair):
    """The stand-in takes 100 bytes for each of them."""
    model, reference = pair
    monkeypatch.setattr(replay, "MAX_SHARE", 2.5e-7)
    for seed in range(8):
        inputs = zoo.batch(seed=seed)
        (loss, ours), (expected, theirs) = zoo.step(model, inputs), zoo.step(reference, inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and max(zoo.errors(ours, theirs).values()) < 1e-4
    assert 0 < recorded(model) < 6
    assert len(find(model, "cuda-graphs-full")) == 1
