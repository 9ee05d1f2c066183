"""How fast this machine multiplies, reads and writes its memory, and copies to the host: measured once a process, in a few milliseconds."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tunecompile._torch.autograd import outside_compilation


@dataclass(frozen=True)
class Rates:
    """Floating point operations of a product, bytes copied from device to host, bytes that a kernel reads and writes, and attention's floating point
    operations, as if nothing were masked: a millisecond each. `launches`: whether there is a time from one kernel to the next."""

    flops: float
    copy: float
    bandwidth: float = float("inf")
    attention: float = float("inf")
    launches: bool = False


SIZE = 8192  #: of the product that is timed: long enough for the rate a GPU sustains, 1.6 ms on an H200
COPIED = 64 << 20  #: bytes
WARM = 0.03  #: seconds of work before the clock runs: a GPU that idled is slower at first, and one that multiplies all the time as well


@functools.cache
def rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Of matrix products in `dtype`. Random numbers: zeros draw less power and run faster."""
    with (
        outside_compilation(),
        torch.cuda.device(device if device.type == "cuda" else -1),
    ):  # events are recorded on its stream
        return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> Rates:
    size = SIZE if device.type == "cuda" else 512
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        left = torch.randn(size, size, device=device, dtype=dtype)
    flops = 2 * size**3 / _milliseconds(lambda: left @ left, device)
    if device.type != "cuda":
        return Rates(flops, float("inf"), attention=flops)
    source, target = (
        torch.empty(COPIED, dtype=torch.uint8, device=device),
        torch.empty(COPIED, dtype=torch.uint8, pin_memory=True),
    )
    copy = COPIED / _milliseconds(lambda: target.copy_(source, non_blocking=True), device)
    bandwidth = 2 * left.nbytes / _milliseconds(left.neg_, device)
    return Rates(flops, copy, bandwidth, flops, launches=True)


def _milliseconds(run: Callable, device: torch.device, repeats: int = 5) -> float:
    """Of one run, the median of a few; the first ones, which load kernels and wake the device, are not counted."""
    run()
    times = []
    if device.type != "cuda":
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)
    until = time.perf_counter() + WARM
    while time.perf_counter() < until or len(times) < repeats:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended))
    return statistics.median(times[-repeats:])
