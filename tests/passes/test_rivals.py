"""Stored times of other packages' kernels: what is no pair of numbers is measured anew."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tunecompile.ir.op import Provider

rivals = importlib.import_module("tunecompile.passes.plan.rivals")


@pytest.mark.parametrize("stored", [None, 1.0, [], [1.0], [1.0, 2.0, 3.0], [1.0, "2"], (1.0, 2.0), [1, 2], {"0": 1.0}])
def test_what_is_no_pair_of_times(stored):
    assert not rivals._sound(stored)


def test_a_pair_of_times():
    assert rivals._sound([1.0, 2.0])


def test_what_a_kernel_is_timed_on():
    """Tensors like those of the call, where they lie: on another device another kernel would be timed."""
    made = rivals._real(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"))
    assert (made.device.type, made.dtype, made.shape) == ("meta", torch.bfloat16, (2, 3))
    assert rivals._real("silu") == "silu"


@pytest.fixture
def bench(monkeypatch):
    """An op of ours and of another package, and a clock that notes whom it timed."""

    def provider(name):
        return Provider(name, lambda x: x, lambda *args: "no" if name in made.refuses else None)

    made = SimpleNamespace(refuses=set(), right=True, timed=[], stored=None)
    made.times = {"theirs": 1.0, "ours": 2.0}
    made.op = SimpleNamespace(name="op", providers=[provider("ours"), provider("theirs")])

    def clock(provider, arguments):
        made.timed.append((provider.name, arguments))
        return made.times[provider.name]

    def prefer(*shape, dtype=torch.float32):
        values = [torch.empty(shape or (2, 3), dtype=dtype), 0.5]
        found = rivals.prefer(made.op, values, lambda op, provider, device: made.right, clock)
        return found and found.name

    made.prefer = prefer
    monkeypatch.setattr(rivals, "PACKAGES", {"theirs": "torch"})
    monkeypatch.setattr(rivals, "_found", {})
    monkeypatch.setattr(rivals.tuning_cache, "read", lambda kind, about, sound: made.stored)
    monkeypatch.setattr(rivals.tuning_cache, "keep", lambda kind, about, value, sound: value)
    return made


def test_the_faster_one_runs_and_each_size_is_measured_once(bench):
    assert bench.prefer() == bench.prefer() == "theirs" and [name for name, _ in bench.timed] == ["theirs", "ours"]
    (given, number) = bench.timed[0][1]
    assert number == 0.5 and given.shape == (2, 3) and given.dtype == torch.float32
    assert given.max() <= 0 and given.min() >= -0.1
    for count, (shape, dtype) in enumerate((((2, 4), torch.float32), ((2, 3), torch.bfloat16)), start=2):
        assert bench.prefer(*shape, dtype=dtype) == "theirs" and len(bench.timed) == 2 * count


@pytest.mark.parametrize("theirs, found", [(1.91, None), (1.89, "theirs"), (1.9, None), (2.5, None)])
def test_another_s_kernel_must_be_faster_by_more_than_noise(bench, theirs, found):
    bench.times["theirs"] = theirs
    assert bench.prefer() == found


def test_times_that_are_stored_are_not_taken_again(bench):
    bench.stored = [3.0, 1.0]
    assert bench.prefer() is None and not bench.timed


def test_a_wrong_one_is_no_provider_any_more(bench):
    bench.right = False
    assert bench.prefer() is None and [each.name for each in bench.op.providers] == ["ours"] and not bench.timed


@pytest.mark.parametrize("name", ["ours", "theirs"])
def test_a_call_that_one_of_them_refuses(bench, name):
    bench.refuses.add(name)
    assert bench.prefer() is None and not bench.timed


def test_a_kernel_that_fails_is_not_the_faster_one(bench):
    del bench.times["theirs"]
    assert bench.prefer() is None and len(bench.timed) == 1


def test_nothing_is_timed_for_a_gpu_that_is_not_there_or_without_a_rival(bench, monkeypatch):
    monkeypatch.setattr(rivals, "pretending", lambda: True)
    assert bench.prefer() is None
    monkeypatch.setattr(rivals, "pretending", lambda: False)
    bench.op.providers.pop()
    assert bench.prefer() is None and not bench.timed and not rivals._found


def test_the_median_of_runs_behind_the_first_two(monkeypatch):
    order, times = [], iter([5.0, 1.0, 2.0, 4.0, 3.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(rivals, "run_provider", lambda run, arguments, used: order.append((run, *arguments)))
    assert rivals.time_on_gpu(SimpleNamespace(run="run"), [1]) == 3.0
    assert order == ["record", ("run", 1), "record", "wait"] * 7
