"""The order of copies between a GPU and host memory, told by a stand-in for torch's streams and events."""

import contextlib
import types

import pytest
import torch

from tunecompile.runtime.memory import host_embedding
from tunecompile.runtime.memory.host import pinned_pool
from tunecompile.runtime.memory.host.pinned_pool import CopyMark, CudaCopyEngine, PinnedBlock

DEVICE = torch.device("cuda", 1)


class Event:
    def __init__(self, enable_timing=False):
        self.timed, self.at, self.waits = enable_timing, None, 0

    def record(self, stream):
        Stream.clock += 1
        self.at = Stream.clock
        stream.did.append(("record", self))

    def synchronize(self):
        self.waits += 1

    def elapsed_time(self, end):
        assert self.timed and end.timed, "CUDA refuses"
        return float(end.at - self.at)


class Stream:
    clock = 0

    def __init__(self, device=None):
        self.device, self.did = device, []

    def wait_stream(self, other):
        self.did.append(("behind", other))

    def wait_event(self, event):
        self.did.append(("wait", event))

    def record_event(self):
        event = Event()
        event.record(self)
        return event


@pytest.fixture
def cuda(monkeypatch):
    """`current` is the computing stream; `made` what was asked of `torch.empty`."""
    there = types.SimpleNamespace(current=Stream(), made=[], inside=[])

    def empty(*shape, **options):
        there.made.append((shape, options, list(there.inside)))
        return torch.empty(*shape, dtype=options["dtype"])

    @contextlib.contextmanager
    def within(what):
        there.inside.append(what)
        yield
        there.inside.pop()

    fake = types.SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=lambda device: there.current, stream=within, device=within
    )
    monkeypatch.setattr(pinned_pool, "torch", types.SimpleNamespace(cuda=fake, empty=empty, uint8=torch.uint8))
    return there


def block(*sizes):
    return PinnedBlock(sum(sizes), [], [torch.zeros(size, dtype=torch.uint8) for size in sizes])


def test_copies_go_out_and_come_back_in_pieces(cuda):
    engine = CudaCopyEngine(DEVICE)
    assert (engine.outward.device, engine.inward.device) == (DEVICE, DEVICE) and engine.outward is not engine.inward
    values, room = torch.arange(7, dtype=torch.uint8), block(3, 4)
    out = engine.out([(values, room)])
    assert torch.cat(room.pieces).tolist() == list(range(7))
    assert engine.outward.did[0] == ("behind", cuda.current) and out.stream is cuda.current
    assert engine.outward.did[1:] == [("record", out.begin), ("record", out.end)] and engine.copies["out"] == [out]
    (again,), back = engine.back([room])
    assert again.tolist() == list(range(7)) and engine.copies == {"out": [out], "back": [back]}
    assert cuda.made == [((7,), {"dtype": torch.uint8, "device": DEVICE}, [])]
    assert engine.inward.did[0] == ("behind", cuda.current) and out.begin.timed and out.end.timed


def test_host_memory_is_pinned_by_its_own_gpu(cuda):
    assert CudaCopyEngine(DEVICE).allocate(12).shape == (12,)
    assert cuda.made == [((12,), {"dtype": torch.uint8, "device": "cpu", "pin_memory": True}, [DEVICE])]


def test_the_host_does_not_wait_for_a_copy(cuda):
    told = []
    target = types.SimpleNamespace(copy_=lambda source, non_blocking=False: told.append((source, non_blocking)))
    CudaCopyEngine(DEVICE)._copy("out", Stream(), [(target, "source")])
    assert told == [("source", True)]


class Used:
    """Memory that says which streams use it."""

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_a_stream_waits_once_for_its_copies(cuda):
    engine, memory = CudaCopyEngine(DEVICE), Used()
    mark = engine.out([(torch.zeros(2, dtype=torch.uint8), block(2))])
    assert not mark.waited
    for _ in range(2):
        engine.wait(mark, memory)
    assert [what for what, _ in cuda.current.did] == ["record", "wait", "record"] and cuda.current.did[1][1] is mark.end
    assert mark.waited and memory.streams == [] and len(engine.waits) == 1


def test_another_stream_waits_by_itself(cuda):
    """And the allocator is told that it uses the memory."""
    engine, memory, first = CudaCopyEngine(DEVICE), Used(), cuda.current
    mark = engine.out([(torch.zeros(2, dtype=torch.uint8), block(2))])
    cuda.current = other = Stream()
    engine.wait(mark, memory)
    engine.wait(mark)
    assert memory.streams == [other] and not mark.waited and first.did == [] and len(engine.waits) == 2
    cuda.current = first
    engine.wait(mark, memory)
    assert mark.waited and memory.streams == [other]
    cuda.current = other
    engine.wait(mark)
    assert len(engine.waits) == 3, "who computes on the memory has waited"


def test_times_are_those_since_they_were_reset(cuda):
    engine = CudaCopyEngine(DEVICE)
    mark = engine.out([(torch.zeros(2, dtype=torch.uint8), block(2))])
    engine.back([block(1)])
    engine.wait(mark)
    assert engine.times() == {"copied_out_ms": 1.0, "copied_back_ms": 1.0, "exposed_ms": 1.0} and mark.end.waits == 1
    fences = engine.fence()
    assert [stream.did[-1] for stream in (engine.outward, engine.inward)] == [("record", each.end) for each in fences]
    engine.order(mark)
    assert engine.outward.did[-1] == ("wait", mark.end)
    mark.synchronize()
    CopyMark().synchronize()
    assert mark.end.waits == 2
    engine.reset()
    assert engine.times() == {"copied_out_ms": 0, "copied_back_ms": 0, "exposed_ms": 0}


def test_a_table_in_host_memory_has_the_same_values(monkeypatch):
    asked = []

    def empty(*shape, pin_memory=False, **options):
        asked.append(pin_memory)
        return torch.empty(*shape, **options)

    def as_tensor(pinned, device):
        told = pinned.__cuda_array_interface__
        assert told["shape"] == (24,) and told["typestr"] == "|u1" and told["version"] == 2
        assert told["data"] == (pinned.memory.data_ptr(), False) and told["strides"] is None
        return pinned.memory.to(device)

    fake = types.SimpleNamespace(empty=empty, as_tensor=as_tensor, uint8=torch.uint8)
    monkeypatch.setattr(host_embedding, "torch", fake)
    for table in (torch.randn(4, 3).bfloat16(), torch.randn(3, 4).bfloat16().t()):
        made = host_embedding.in_host_memory(table)
        assert torch.equal(made, table) and (made.dtype, made.shape, made.device) == (
            table.dtype,
            table.shape,
            table.device,
        )
    assert asked == [True, True]
