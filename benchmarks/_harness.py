"""Timing of kernels beside each other: medians, inputs larger than L2, a table and JSON lines.

    python benchmarks/nf4.py [--out results.jsonl] [--sweep] [--only TEXT]
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

PEAK_GBPS = 4300.0  # what a device-to-device copy reaches on an H200 (shared/performance.md)
L2_BYTES = 60e6


class Bench:
    """Collects the cases of one script; every case becomes rows of the table and lines of ``--out``."""

    def __init__(self, name: str) -> None:
        parser = argparse.ArgumentParser(description=f"{name}: template against its peers")
        parser.add_argument("--out", help="append JSON lines to this file")
        parser.add_argument("--sweep", action="store_true", help="time every tile of the template as well")
        parser.add_argument("--only", default="", help="only cases whose name contains this")
        parser.add_argument("--ms", type=int, default=60, help="milliseconds of repetitions a measurement")
        self.options = parser.parse_args()
        self.name = name
        self.table = Table(title=f"{name} on {torch.cuda.get_device_name()}, torch {torch.__version__}")
        for column in ("case", "system", "ms", "GB/s", f"% of {PEAK_GBPS / 1000:.1f} TB/s", "TFLOP/s", "error"):
            self.table.add_column(column, justify="left" if column in ("case", "system") else "right")

    def __call__(self, case: str, fn_by_system: dict[str, Callable | Exception], make: Callable[[int], Sequence[Any]], *,
                 bytes: float, flops: float = 0.0, check: Callable[[Any, Any], float] | None = None) -> None:
        """Time each system on inputs from ``make(seed)``.

        The inputs rotate: as many sets as exceed L2 twice. bytes, flops: the least the operation needs, the same for every
        system. check(result, result of the first system) -> error, shown beside the time. A system that is an exception
        (an import that failed) or raises is a row with its reason.
        """
        if self.options.only not in case:
            return
        sets = [make(seed) for seed in range(max(2, min(8, int(2 * L2_BYTES / bytes) + 1)))]
        first = None
        for system, function in fn_by_system.items():
            try:
                if isinstance(function, Exception):
                    raise function
                if check is not None:
                    result = function(*make(0))
                    first = result if first is None else first
                    error = check(result, first)
                    del result
                else:
                    error = float("nan")
                self._row(case, system, self._median(function, sets), bytes, flops, error)
            except ImportError:
                self._failed(case, system, "not installed")
            except Exception as e:  # a peer that fails must not end the run
                self._failed(case, system, f"{type(e).__name__}: {e}".splitlines()[0][:80])

    def _median(self, function: Callable, sets: list) -> float:
        import triton

        rotation = itertools.cycle(sets)
        return triton.testing.do_bench(lambda: function(*next(rotation)), warmup=15, rep=self.options.ms, return_mode="median")

    def _row(self, case, system, ms, size, flops, error):
        gbps, tflops = size / ms / 1e6, flops / ms / 1e9
        self.table.add_row(case, system, f"{ms:.4f}", f"{gbps:,.0f}", f"{100 * gbps / PEAK_GBPS:.1f}", f"{tflops:.1f}" if flops else "",
                           "" if error != error else f"{error:.1e}")
        self._write(case=case, system=system, ms=ms, gbps=gbps, percent=100 * gbps / PEAK_GBPS, tflops=tflops, error=error)

    def _failed(self, case, system, reason):
        self.table.add_row(case, system, reason)
        self._write(case=case, system=system, failed=reason)

    def _write(self, **fields):
        if self.options.out:
            import triton

            fields = {k: v for k, v in fields.items() if v == v}
            with open(self.options.out, "a") as f:
                f.write(json.dumps({"benchmark": self.name, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                                    "triton": triton.__version__, **fields}) + "\n")

    def show(self) -> None:
        Console(width=150).print(self.table)


def attempt(load: Callable[[], Callable]) -> Callable | Exception:
    """``load()``, or the exception it raised, for packages that may be absent."""
    try:
        return load()
    except Exception as e:
        return e


def compiled(function: Callable) -> Callable:
    """``function`` under torch.compile, one graph, static shapes."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values on the GPU. Never zeros: they draw less power and run faster."""
    g = torch.Generator("cuda").manual_seed(seed + 1)
    return torch.randn(*shape, generator=g, device="cuda", dtype=dtype)


def packed_nf4(n: int, k: int) -> Callable[[int], tuple]:
    """seed -> (packed, absmax, its code, its scales, its offset) of a double-quantised weight [n, k] in blocks of 64."""
    def make(seed):
        g = torch.Generator("cuda").manual_seed(seed)
        blocks = n * k // 64
        packed = torch.randint(0, 256, (n * k // 2, 1), generator=g, device="cuda", dtype=torch.uint8)
        absmax = torch.randint(0, 256, (blocks,), generator=g, device="cuda", dtype=torch.uint8)
        code = torch.linspace(-1, 1, 256, device="cuda").pow(3)
        return packed, absmax, code, torch.rand(blocks // 256, generator=g, device="cuda") + 0.1, torch.tensor(0.7, device="cuda")
    return make


def relative_error(value: Any, reference: Any) -> float:
    """Largest ||value - reference|| / ||reference|| over the tensors of two results."""
    if isinstance(value, torch.Tensor):
        value, reference = (value,), (reference,)
    return max(float((v.float() - r.float()).norm() / r.float().norm().clamp_min(1e-30)) for v, r in zip(value, reference))
