"""How a kernel is timed, with events of a GPU that is not there."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from tunecompile.planner import device_memory, hardware
from tunecompile.planner.device_memory import CONTEXT, CudaGauge

CUDA = torch.device("cuda", 0)


def timed(monkeypatch, milliseconds, clock):
    """(What is said of runs that take these times, how many runs there were), where each reading of the clock is
    the next of `clock`."""
    runs, times, readings, busy = [], iter(milliseconds), iter(clock), []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing
            self.recorded = self.waited = False

        def record(self):
            self.recorded, self.after = True, len(runs)
            assert busy[-1] in (self.after, self.after - 1), "a run on a GPU that waits is timed with its launch"

        def synchronize(self):
            assert self.recorded
            self.waited = True

        def elapsed_time(self, end):
            assert end.waited and (self.after, end.after) == (len(runs) - 1, len(runs))
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(hardware, "occupy_gpu", lambda cycles: busy.append(len(runs)))
    monkeypatch.setattr(hardware, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    return hardware._milliseconds(lambda: runs.append(1), CUDA), len(runs)


def test_the_median_of_the_last_runs_on_a_warm_gpu(monkeypatch):
    late = [0.0, *[0.01] * 7, *[1.0] * 9]
    assert timed(monkeypatch, [90, 80, 70, 1, 5, 2, 9], late) == (5, 8)
    assert timed(monkeypatch, [3, 1, 2, 5, 4], [0.0, *[1.0] * 9]) == (3, 6)
    assert timed(monkeypatch, [9, 9, 3, 1, 2, 5, 4], [0.0, *[0.01] * 6, hardware.WARM]) == (3, 7), "no run too many"


def test_on_a_cpu_the_clock_is_read(monkeypatch):
    readings = iter([0.0, 0.004, 1.0, 1.001, 2.0, 2.003, 3.0, 3.009, 4.0, 4.002])
    monkeypatch.setattr(hardware, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    runs = []
    found = hardware._milliseconds(lambda: runs.append(time.perf_counter()), torch.device("cpu"))
    assert abs(found - 3.0) < 1e-9 and len(runs) == 6


def test_products_in_tf32_are_measured_by_themselves(monkeypatch):
    """The first rate was kept for the process: an eighth of what fp32 reaches once the user allows TF32."""
    measured = []
    monkeypatch.setattr(hardware, "_measured", lambda device, dtype: measured.append(dtype) or len(measured))
    hardware._once.cache_clear()
    before = torch.get_float32_matmul_precision()
    try:
        found = []
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            found.append([hardware.measure_rates(torch.device("cpu"), d) for d in (torch.float32, torch.bfloat16)])
    finally:
        torch.set_float32_matmul_precision(before)
        hardware._once.cache_clear()
    assert found == [[1, 2], [3, 2], [1, 2]]


def test_bytes_of_a_gpu(monkeypatch):
    """By the driver's and the allocator's books; other processes' tensors are none of this one's libraries."""
    books = {"free": 50, "total": 100, "reserved": 20}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (books["free"], books["total"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: books["reserved"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: books.get("share", 1.0))
    gauge = CudaGauge(CUDA)
    assert gauge.outside() == 30 and gauge.available() == 70
    books["share"] = 0.5
    assert gauge.available() == 40
    books["total"] = 10 * CONTEXT
    assert gauge.outside() == CONTEXT == 1 << 30


def test_products_of_a_cpu_are_measured_anew_by_its_own_precision(monkeypatch):
    """A user may set one backend alone."""
    asked = []
    monkeypatch.setattr(hardware, "_once", lambda device, dtype, precision: asked.append(precision))
    monkeypatch.setattr(torch.backends, "cuda", SimpleNamespace(matmul=SimpleNamespace(fp32_precision="of a GPU")))
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace(matmul=SimpleNamespace(fp32_precision="of a CPU")))
    for device in (torch.device("cpu"), CUDA):
        for dtype in (torch.float32, torch.float16):
            hardware.measure_rates(device, dtype)
    assert asked == ["of a CPU", "", "of a GPU", ""]


def test_a_device_is_measured_with_products_copies_and_element_wise_code(monkeypatch):
    """Each in its own time: of 2 ms a product, 4 ms a copy and 8 ms a kernel that reads and writes. A CPU copies nothing."""
    times, runs = iter([2.0, 4.0, 8.0, 2.0]), []
    monkeypatch.setattr(hardware, "SIZE", 64)
    monkeypatch.setattr(hardware, "_milliseconds", lambda run, device: runs.append(run) or next(times))
    plain, copied = torch.randn, []

    def empty(nbytes, dtype, device, pin_memory=False):
        made = SimpleNamespace(given=(nbytes, dtype, torch.device(device), pin_memory))
        made.copy_ = lambda source, non_blocking=False: copied.append((made.given, source.given, non_blocking))
        return made

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "randn", lambda *sizes, device, dtype: plain(*sizes, dtype=dtype))
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    found = hardware._measured(CUDA, torch.float16)
    assert found == hardware.Rates(2 * 64**3 / 2, (64 << 20) / 4, 2 * 64 * 64 * 2 / 8, 2 * 64**3 / 2, launches=True)
    assert len(runs) == 3 and runs[0]().shape == (64, 64) and runs[1]() is None
    on_host, there = ((64 << 20, torch.uint8, at, at.type == "cpu") for at in (torch.device("cpu"), CUDA))
    assert copied == [(on_host, there, True)], "of pinned memory, while the host goes on"
    assert hardware._measured(torch.device("cpu"), torch.float32) == hardware.Rates(
        2 * 512**3 / 2, float("inf"), attention=2 * 512**3 / 2
    )


def test_books_of_a_gpu(monkeypatch):
    """Each is asked of its own device; a device without failures has none in its books."""
    asked = []

    def book(value):
        return lambda device: asked.append(device) or value

    counts = {"allocated_bytes": {"all": {"current": 1}}}
    values = {
        "memory_stats_as_nested_dict": counts,
        "max_memory_allocated": 2,
        "max_memory_reserved": 3,
        "memory_stats": {},
    }
    for name, value in {**values, "reset_peak_memory_stats": None}.items():
        monkeypatch.setattr(torch.cuda, name, book(value))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    monkeypatch.setattr(device_memory, "total_memory", book(5))
    gauge = device_memory.gauge_of(torch.device("cuda", 1))
    assert (gauge.allocated(), gauge.peak(), gauge.failures(), gauge.total()) == (1, (2, 3), 0, 5)
    values["memory_stats"]["num_ooms"] = 7
    assert gauge.failures() == 7 and set(asked) == {gauge.device}
    gauge.release()
    assert asked.pop() == "emptied"
    count = len(asked)
    gauge.forget_peak()
    assert len(asked) == count + 1


def test_books_of_a_cpu_are_empty():
    gauge = device_memory.gauge_of(torch.device("cpu"))
    assert (gauge.allocated(), gauge.peak(), gauge.failures(), gauge.outside()) == (0, (0, 0), 0, 0)
    assert gauge.release() is gauge.forget_peak() is None


def test_bytes_as_text_and_of_what_is_trained():
    assert [device_memory.shown(n) for n in (3 << 19, (1 << 30) - 1, 1 << 30, 3 << 29)] == [
        *("1.50 MiB", "1024.00 MiB", "1.00 GiB", "1.50 GiB")
    ]
    trained = torch.empty(3, 5, dtype=torch.float16), torch.empty(7)
    assert device_memory.gradient_bytes(trained) == 58 and device_memory.moment_bytes(trained) == 116
