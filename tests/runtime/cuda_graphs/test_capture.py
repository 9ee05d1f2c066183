"""How graphs are captured: the calls to torch's CUDA, of which this machine may have none, in their order."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from tunecompile.runtime.cuda_graphs import capture
from tunecompile.runtime.cuda_graphs.capture import CudaRecorder

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def said(monkeypatch):
    """What was called."""
    calls = []

    class Stream:
        def __init__(self, name="recording"):
            self.name = name

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    class CUDAGraph:
        def capture_begin(self, pool, capture_error_mode):
            calls.append(("begin", pool, capture_error_mode))

        def capture_end(self):
            calls.append("end")

        def replay(self):
            calls.append("replayed")

    @contextlib.contextmanager
    def inside(what):
        calls.append(f"in {getattr(what, 'name', what)}")
        yield
        calls.append(f"out of {getattr(what, 'name', what)}")

    handles = iter(range(1, 9))
    loop = Stream("loop")

    class Event:
        done = True

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def query(self):
            return self.done

        def elapsed_time(self, end):
            return 2.5

    stand_in = SimpleNamespace(
        Event=Event, memory_stats_as_nested_dict=lambda device: {"reserved_bytes": {"all": {"current": 7}}}, empty_cache=lambda: calls.append("emptied"), Stream=Stream, CUDAGraph=CUDAGraph, stream=inside, device=inside,
        current_stream=lambda: loop, graph_pool_handle=lambda: next(handles),
    )  # fmt: skip
    monkeypatch.setattr(capture.torch, "cuda", stand_in)
    return calls


def test_a_capture_waits_for_the_loop_and_the_loop_for_it(said):
    """On a stream of its own; calls of other threads, such as a loader's, are no error of it."""
    outputs, play = CudaRecorder().record(lambda: said.append("run") or ["made"], "pool", FIRST)
    assert said == [
        "in cuda:0", "recording waits for loop", "in recording", ("begin", 1, "thread_local"), "run", "end",
        "out of recording", "loop waits for recording", "out of cuda:0",
    ]  # fmt: skip
    play()
    assert outputs == ["made"] and said[-1] == "replayed"


def test_a_capture_that_fails_ends_all_the_same(said):
    """Or no later one could begin."""

    def run():
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        CudaRecorder().record(run, "pool", FIRST)
    assert said[-1] == "end"


def test_recordings_share_a_pool_while_one_of_them_lives(said):
    recorder = CudaRecorder()

    def handle(pool="pool", device=FIRST):
        play = recorder.record(list, pool, device)[1]
        return play, next(call[1] for call in reversed(said) if call[0] == "begin")

    (first, one), (second, two), (third, three), (fourth, four) = (
        handle(), handle(), handle("another"), handle(device=SECOND),
    )  # fmt: skip
    assert (one, two, three, four) == (1, 1, 2, 3) and len(recorder.streams) == 2
    del first, second
    gc.collect()
    assert handle()[1] == 4, "the allocator refuses a pool whose recordings have all been freed"
    assert handle("another")[1] == 2
    recorder.forget()
    assert handle("another")[1] == 5 and third and fourth


def test_marks_tell_the_time_once_the_device_has_come_to_both(said):
    recorder = CudaRecorder()
    begin, end = (recorder.mark(device) for device in (FIRST, SECOND))
    assert said == ["in cuda:0", "record", "out of cuda:0", "in cuda:1", "record", "out of cuda:1"]
    assert recorder.elapsed(begin, end) == 2.5
    for late in (begin, end):
        late.done = False
        assert recorder.elapsed(begin, end) is None
        late.done = True


def test_the_device_is_kept_busy_and_its_memory_told(said, monkeypatch):
    monkeypatch.setattr(capture, "occupy_gpu", said.append)
    monkeypatch.setattr(capture, "total_memory", lambda device: 100 + device.index)
    recorder = CudaRecorder()
    recorder.occupy(SECOND, 1.5)
    assert said == ["in cuda:1", int(1.5 * capture.CYCLES), "out of cuda:1"]
    recorder.release()
    assert recorder.memory(SECOND) == (7, 101) and said[-1] == "emptied"
