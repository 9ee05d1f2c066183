"""How a kernel is timed, with events of a GPU that is not there."""

import time
from types import SimpleNamespace

import torch

from tunecompile.planner import hardware
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
    assert gauge.outside() == CONTEXT
