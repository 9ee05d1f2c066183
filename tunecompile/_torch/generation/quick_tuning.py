"""Kernels are tuned in their first call by fewer runs than torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunecompile._torch.lookup import exist, lookup

_HEURISTICS = "torch._inductor.runtime.triton_heuristics"
_heuristics: Any = lookup(_HEURISTICS) if exist(_HEURISTICS, f"{_HEURISTICS}.benchmarker") else None


class _QuickBenchmarks:
    """Inductor's benchmarks of a kernel's configurations, with fewer runs: the fastest counts, and 20 tell it."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def benchmark(self, *args: Any, **kwargs: Any) -> Any:
        on_cpu = str(kwargs.get("device", "cuda")).startswith("cpu")
        return self.plain.benchmark(*args, **({} if on_cpu else _FEW_RUNS), **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


_FEW_RUNS = {"memory_warmup_iters": 5, "benchmark_iters": 20}


def tuned_quickly(call: Callable) -> Callable:
    """The same code, whose kernels are tuned in its first call without torch's 200 runs of each configuration.

    These are 1 s of a first step of a dense model and 1.9 s of a hybrid one (H100).
    """
    if _heuristics is None:
        return call
    tuned = False

    def run(*args: Any) -> Any:
        nonlocal tuned
        if tuned:
            return call(*args)
        plain = _heuristics.benchmarker
        plain = plain.plain if isinstance(plain, _QuickBenchmarks) else plain  # by another thread
        _heuristics.benchmarker = _QuickBenchmarks(plain)
        try:
            made = call(*args)
        finally:
            _heuristics.benchmarker = plain
        tuned = True
        return made

    return run
