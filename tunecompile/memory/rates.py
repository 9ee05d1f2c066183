"""How fast this machine multiplies and copies to the host: measured once a process, in a few milliseconds."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Callable

import torch

from tunecompile._torch import outside_compilation


@dataclass(frozen=True)
class Rates:
    """Floating point operations, and bytes copied from device to host, a millisecond."""

    flops: float
    copy: float


SIZE = 8192  #: of the product that is timed: long enough for the rate a GPU sustains, 1.6 ms on an H200
COPIED = 64 << 20  #: bytes
ALLOWANCE = 1.25  #: a step's time by that of its products and attention alone. 8B on an H200: 1.22 at 4x2048, 1.65 at 2x512


@functools.cache
def rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Of matrix products in `dtype`. Random numbers: zeros draw less power and run faster."""
    with outside_compilation():
        return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> Rates:
    size = SIZE if device.type == "cuda" else 512
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        left = torch.randn(size, size, device=device, dtype=dtype)
    product = _milliseconds(lambda: left @ left, device)
    if device.type != "cuda":
        return Rates(2 * size**3 / product, float("inf"))
    source, target = torch.empty(COPIED, dtype=torch.uint8, device=device), torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    return Rates(2 * size**3 / product, COPIED / _milliseconds(lambda: target.copy_(source, non_blocking=True), device))


def _milliseconds(run: Callable, device: torch.device, repeats: int = 5) -> float:
    """Of one run, the median of a few; the first one, which loads kernels, is not counted."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            run()
            ended.record()
            ended.synchronize()
            times.append(begun.elapsed_time(ended))
        else:
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1e3)
    return sorted(times[1:])[repeats // 2]
