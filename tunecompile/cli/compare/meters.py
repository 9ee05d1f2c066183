"""Measurements in a worker: step times, memory, bytes of saved tensors, kernel launches."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

from tunecompile.cli.compare.progress import say, wait_to_go

WARMUP = 3  # steps that are not timed, for compilation, allocator and caches
GIB = 2**30


class StepClock:
    """Times each step by CUDA events or the host's clock. Only the first step is followed by a synchronisation."""

    def __init__(self, device: str, label: str, total: int):
        self.cuda, self.label, self.total = device == "cuda", label, total
        self.host_ms: list[float] = []
        self.events: list[tuple] = []
        self.losses: list[torch.Tensor] = []
        self.tokens: list[int] = []

    def begin(self, tokens: int) -> None:
        """Begin a step on a batch of so many tokens."""
        self.tokens.append(tokens)
        if os.environ.get("TUNECOMPILE_TURNS"):  # processes that alternate are equally affected by other load
            wait_to_go()
        if self.cuda:
            self.events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self.events[-1][0].record()
        self.started = time.perf_counter()

    def end(self, loss: torch.Tensor) -> None:
        """End the step."""
        if self.cuda:
            self.events[-1][1].record()
            if not self.host_ms:
                torch.cuda.synchronize()
        self.host_ms.append((time.perf_counter() - self.started) * 1e3)
        self.losses.append(loss.detach())
        if len(self.host_ms) == WARMUP and not self.cuda:
            reset_peak_rss()  # the memory of the compiler does not count
        shown = None if self.cuda else round(float(loss.detach()), 4)
        seconds = self.host_ms[-1] / 1e3
        say("step", label=self.label, step=len(self.host_ms), steps=self.total, loss=shown, seconds=seconds)

    def step_ms(self) -> list[float]:
        """Milliseconds of all steps."""
        if self.cuda:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in self.events]
        return self.host_ms

    def figures(self) -> dict:
        """The time figures of a result: median of the timed steps, and tokens a second without padding."""
        times, tokens = self.step_ms(), self.tokens
        warm = min(WARMUP, len(times) - 1)
        timed = times[warm:]
        middle = median(timed)
        figures = {
            "repeats": len(timed),
            "tokens_per_s": sum(tokens[warm:]) / len(timed) / middle * 1e3,
            "step_ms": {"median": middle, "min": min(timed), "max": max(timed)},
            "all_step_ms": times,
            "first_step_s": self.host_ms[0] / 1e3,
            "losses": [float(loss) for loss in self.losses],
        }
        if self.cuda:
            figures["host_ms_per_step"] = median(self.host_ms[warm:])
        return figures


# ---------------------------------------------------------------- memory


def reset_peak_rss() -> None:
    """Reset the peak of resident memory, which Linux supports."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Peak of resident memory since the last reset, in bytes."""
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_memory(device: str) -> None:
    """Reset the peaks of memory."""
    if device == "cuda":
        torch.cuda.empty_cache()
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(gpu)
    else:
        reset_peak_rss()


def memory_figures(device: str) -> dict:
    """Peaks of memory: of the GPU on which this process needed most, or of the host."""
    if device == "cuda":
        gpus = range(torch.cuda.device_count())
        return {
            "peak_gib": max(map(torch.cuda.max_memory_allocated, gpus)) / GIB,
            "peak_reserved_gib": max(map(torch.cuda.max_memory_reserved, gpus)) / GIB,
        }
    return {"peak_gib": peak_rss() / GIB, "peak_reserved_gib": None}


def resident_storages(model: torch.nn.Module) -> set[int]:
    """Data pointers of storages that exist outside of steps: parameters, buffers and scales of quantised weights."""

    def storages(tensor: torch.Tensor) -> Iterator[int]:
        yield tensor.untyped_storage().data_ptr()
        state = getattr(tensor, "quant_state", None)
        while state is not None:
            for value in vars(state).values():
                if isinstance(value, torch.Tensor):
                    yield value.untyped_storage().data_ptr()
            state = getattr(state, "state2", None)

    tensors = [*model.parameters(), *model.buffers()]
    return {pointer for tensor in tensors for pointer in storages(tensor)}


def count_saved_bytes(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Bytes of the storages that autograd saves between forward and backward, without parameters."""
    resident, saved = resident_storages(model), {}

    def pack(tensor):
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in resident:
                saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    total = sum(saved.values())
    loss.backward()
    return total


def count_launches(step: Callable[[], object]) -> int:
    """Kernel launches of one step, as counted by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    launches = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")
    return sum(event.name.startswith(launches) for event in profiler.events())
