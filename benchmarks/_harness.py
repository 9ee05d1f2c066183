"""Timing of kernels beside each other: medians, cold caches, a table and one JSON.

    python benchmarks/kernels/nf4.py [--out results.json] [--only TEXT] [--sweep] [--shown] [--dry]

What is timed is what the GPU does: before each repetition its L2 cache is overwritten and it is kept waiting while the host queues the
call, so a Python layer around a kernel costs nothing, whoever's it is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks._jobs import DEVICE
from benchmarks._results import write
from tunecompile._torch.cuda import occupy_gpu
from tunecompile.cli.compare.machine import header

L2_BYTES = 60e6
WARMUP = 4
INDUCTOR, TEMPLATE = "Inductor", "template"  #: how the systems of every case are called that the README compares


@dataclass(frozen=True)
class Before:
    """What happens before the clock starts: prepare(*inputs) gives the call that is timed. A kernel that works in place gets copies
    here, each in the layout it likes best, and a backward pass its forward pass."""

    prepare: Callable[..., Callable[[], Any]]


System = Callable | Before | Exception


class Bench:
    """Runs the cases of the families; each system of a case becomes a row."""

    def __init__(
        self, only: str = "", sweep: bool = False, shown: bool = False, dry: bool = False, repetitions: int = 30
    ) -> None:
        self.only, self.sweep, self.shown, self.dry, self.repetitions = only, sweep, shown, dry, repetitions
        self.family = ""
        self.rows: list[dict[str, Any]] = []
        self.ended: Callable[[], None] = lambda: None  #: called behind each case
        self.copy_gbps = float("nan")
        self.flush = torch.empty(256 << 20 if DEVICE == "cuda" else 1, dtype=torch.uint8, device=DEVICE)

    def size(self, n: int) -> int:
        """`n`, or in a dry run something Triton's interpreter gets through."""
        return min(n, 128) if self.dry else n

    def tiles(self, tiles: Callable[[], Mapping[str, System]]) -> Mapping[str, System]:
        """The template with other tiles, where they are asked for."""
        return tiles() if self.sweep else {}

    def __call__(
        self,
        case: str,
        systems: Mapping[str, System],
        make: Callable[[int], Sequence[Any]],
        *,
        bytes: float,
        flops: float = 0.0,
        check: Callable[[Any, Any], float] | None = None,
        shown: str = "",
    ) -> None:
        """Time each system on inputs from ``make(seed)``, several sets in turn.

        bytes, flops: the least the operation needs, the same for every system. check(result, result of the first system) -> error,
        shown beside the time. A system that is an exception (an import that failed) or raises is a row with its reason.
        shown: what the README calls the case; ``--shown`` runs only cases with such a name.
        """
        if self.only not in f"{self.family} {case}" or (self.shown and not shown):
            return
        sets = [make(seed) for seed in range(max(2, min(8, int(2 * L2_BYTES / bytes) + 1)))]
        first = None
        for name, system in systems.items():
            row = {"family": self.family, "case": case, "system": name, "shown": shown}
            try:
                if isinstance(system, Exception):
                    raise system
                if check is not None:
                    result = _prepared(system, make(0))()
                    first = result if first is None else first
                    row["error"] = check(result, first)
                    del result
                ms = self._median(system, sets)
                row |= {
                    "ms": ms,
                    "gbps": bytes / ms / 1e6,
                    "percent": 100 * bytes / ms / 1e6 / self.copy_gbps,
                    "tflops": flops / ms / 1e9,
                }
            except ImportError as error:
                row["failed"] = f"not installed: {error}".splitlines()[0][:80]
            except Exception as error:  # a peer that fails must not end the run
                row["failed"] = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:160]
            self.rows.append(
                {key: value for key, value in row.items() if not (isinstance(value, float) and math.isnan(value))}
            )
        self.ended()

    def _median(self, system: System, sets: list) -> float:
        """Milliseconds."""
        rotation = itertools.cycle(sets)
        if DEVICE == "cpu":  # says nothing about speed
            call, begin = _prepared(system, next(rotation)), time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        clocks = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(WARMUP + self.repetitions)
        ]
        for begin, end in clocks:
            call = _prepared(system, next(rotation))
            self.flush.zero_()
            occupy_gpu()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in clocks[WARMUP:])

    def measure_copy(self) -> None:
        """What a copy on this device reaches: the limit that `percent` is of."""
        source = randn((256 << 20) if DEVICE == "cuda" else 128)
        self.copy_gbps = 2 * source.nbytes / self._median(lambda x: x.clone(), [(source,)]) / 1e6


def _prepared(system: Callable | Before, inputs: Sequence[Any]) -> Callable[[], Any]:
    return system.prepare(*inputs) if isinstance(system, Before) else functools.partial(system, *inputs)


def main(families: Mapping[str, Callable[[Bench], None]], shown: bool = False) -> None:
    """Parse arguments, run, print, and write ``--out``."""
    parser = argparse.ArgumentParser(description=f"{', '.join(families)}: templates against their peers")
    parser.add_argument("--out", type=Path, help="write one JSON here")
    parser.add_argument("--only", default="", help="only cases whose family and name contain this")
    parser.add_argument(
        "--shown", action=argparse.BooleanOptionalAction, default=shown, help="only the cases of the README's table"
    )
    parser.add_argument("--sweep", action="store_true", help="time every tile of the template as well")
    parser.add_argument(
        "--dry", action="store_true", help="tiny sizes: checks that everything runs, says nothing about speed"
    )
    parser.add_argument("--repetitions", type=int, default=30)
    given = parser.parse_args()
    bench = Bench(given.only, given.sweep, given.shown, given.dry, given.repetitions)
    bench.measure_copy()
    about, to_come = {**header(), "copy_gbps": bench.copy_gbps}, list(families)

    def keep() -> None:
        if given.out:
            write(given.out, {**about, "rows": bench.rows}, to_come)

    bench.ended = keep
    for bench.family, run in families.items():
        try:
            run(bench)
        except Exception as error:
            bench.rows.append(
                {"family": bench.family, "case": "", "system": "", "failed": f"{type(error).__name__}: {error}"[:300]}
            )
        to_come.remove(bench.family)
        keep()
    show(bench)


def show(bench: Bench) -> None:
    table = Table(
        title=f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU, interpreted'}, torch {torch.__version__}"
    )
    for column in (
        "family",
        "case",
        "system",
        "ms",
        "GB/s",
        f"% of {bench.copy_gbps / 1000:.1f} TB/s",
        "TFLOP/s",
        "error",
    ):
        table.add_column(column, justify="left" if column in ("family", "case", "system") else "right")
    for row in bench.rows:
        names = row["family"], row["case"], row["system"]
        if "failed" in row:
            table.add_row(*names, row["failed"])
            continue
        table.add_row(
            *names,
            f"{row['ms']:.4f}",
            f"{row['gbps']:,.0f}",
            f"{row['percent']:.1f}",
            f"{row['tflops']:.1f}" if row["tflops"] else "",
            f"{row['error']:.1e}" if "error" in row else "",
        )
    Console(width=170).print(table)


def attempt(load: Callable[[], System]) -> System:
    """``load()``, or the exception it raised, for packages that may be absent. What they change in the compiler's settings is undone."""
    try:
        with _settings_kept():
            return load()
    except Exception as error:
        return error


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    import torch._dynamo.config
    import torch._inductor.config

    configs = torch._inductor.config, torch._dynamo.config
    saved = [config.get_config_copy() for config in configs]
    try:
        yield
    finally:
        for config, state in zip(configs, saved):
            now = config.get_config_copy()
            for name, value in state.items():
                if now.get(name) != value:
                    setattr(config, name, value)


def compiled(function: Callable) -> Callable:
    """``function`` under torch.compile, one graph, static shapes. (Without a GPU as it is: nothing is timed there.)"""
    return torch.compile(function, fullgraph=True, dynamic=False) if DEVICE == "cuda" else function


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values. Never zeros: they draw less power and run faster."""
    g = torch.Generator(DEVICE).manual_seed(seed + 1)
    return torch.randn(*shape, generator=g, device=DEVICE, dtype=dtype)


def backward_of(function: Callable, frozen: Sequence[int] = ()) -> Before:
    """The backward pass of ``function(*inputs)``, timed alone: its inputs come after the gradients of its outputs, which it may
    overwrite. ``frozen``: positions among the inputs that want no gradient."""

    def prepare(*given):
        grads, inputs = given[0], given[1:]
        grads = [g.clone() for g in (grads if isinstance(grads, tuple) else (grads,))]
        leaves = [
            x.detach().clone().requires_grad_(i not in frozen) for i, x in enumerate(inputs)
        ]  # a forward pass may work in place, too
        out = function(*leaves)
        wanted = [x for x in leaves if x.requires_grad]
        return lambda: torch.autograd.grad(out, wanted, grads)

    return Before(prepare)


def packed_nf4(n: int, k: int) -> Callable[[int], tuple]:
    """seed -> (packed, absmax, its code, its scales, its offset) of a double-quantised weight [n, k] in blocks of 64."""

    def make(seed):
        g = torch.Generator(DEVICE).manual_seed(seed)
        blocks = n * k // 64
        packed = torch.randint(0, 256, (n * k // 2, 1), generator=g, device=DEVICE, dtype=torch.uint8)
        absmax = torch.randint(0, 256, (blocks,), generator=g, device=DEVICE, dtype=torch.uint8)
        code = torch.linspace(-1, 1, 256, device=DEVICE).pow(3)
        return (
            packed,
            absmax,
            code,
            torch.rand(-(-blocks // 256), generator=g, device=DEVICE) + 0.1,
            torch.tensor(0.7, device=DEVICE),
        )

    return make


def relative_error(value: Any, reference: Any) -> float:
    """Largest ||value - reference|| / ||reference|| over the tensors of two results, as far as both have them."""
    if isinstance(value, torch.Tensor):
        value = (value,)
    if isinstance(reference, torch.Tensor):
        reference = (reference,)
    return max(
        float((v.float() - r.float()).norm() / r.float().norm().clamp_min(1e-30)) for v, r in zip(value, reference)
    )
