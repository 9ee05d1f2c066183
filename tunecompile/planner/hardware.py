"""How fast this device multiplies, uses its memory and copies to the host: measured once a process."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tunecompile._torch.autograd import outside_compilation
from tunecompile._torch.cuda import occupy_gpu


@dataclass(frozen=True)
class Rates:
    """What a device does in a millisecond."""

    flops: float  #: floating point operations of a product, a millisecond
    copy: float  #: bytes copied from device to host, a millisecond
    bandwidth: float = float("inf")  #: bytes that a kernel reads and writes, a millisecond
    attention: float = float("inf")  #: floating point operations of attention, as if nothing were masked, a millisecond
    launches: bool = False  #: whether there is a gap from one kernel to the next


SIZE = 8192  #: rows and columns of the timed product: long enough for the rate a GPU sustains, 1.6 ms on an H200
COPIED = 64 << 20  #: bytes of the timed copy
REPEATS = 5  #: of a timed run, of which the median counts

#: Seconds of work before the clock runs: a GPU that idled is slower at first, and one that multiplies all the time as
#: well.
WARM = 0.03
#: Cycles for which the GPU is busy before a run, so that the run is launched by then: on a GPU that waits, a slow host,
#: or one whose threads compile, would be timed with it. (An element-wise kernel takes 0.1 ms, and its launch as long.)
BUSY = 500_000


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure a device once a process, with matrix products in `dtype`; those of fp32 once with TF32 and once without.

    The products are of random numbers: zeros draw less power and run faster.
    """
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return _once(device, dtype, backend.matmul.fp32_precision if dtype == torch.float32 else "")


@functools.cache
def _once(device: torch.device, dtype: torch.dtype, precision: str) -> Rates:
    with outside_compilation(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # of its events
        return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> Rates:
    """Time a product, a copy and an element-wise kernel. Without a GPU a product alone."""
    size = SIZE if device.type == "cuda" else 512
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        left = torch.randn(size, size, device=device, dtype=dtype)
    flops = 2 * size**3 / _milliseconds(lambda: left @ left, device)
    if device.type != "cuda":
        return Rates(flops, float("inf"), attention=flops)
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty(COPIED, dtype=torch.uint8, device="cpu", pin_memory=True)
    copy = COPIED / _milliseconds(lambda: target.copy_(source, non_blocking=True), device)
    bandwidth = 2 * left.nbytes / _milliseconds(left.neg_, device)
    return Rates(flops, copy, bandwidth, flops, launches=True)


def _milliseconds(run: Callable, device: torch.device) -> float:
    """The median milliseconds of a few runs.

    The first runs, which load kernels and wake the device, are not counted.
    """
    run()
    times = []
    if device.type != "cuda":
        for _ in range(REPEATS):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)
    until = time.perf_counter() + WARM
    while time.perf_counter() < until or len(times) < REPEATS:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        occupy_gpu(BUSY)
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended))
    return statistics.median(times[-REPEATS:])
