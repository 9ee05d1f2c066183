"""Memory against time, and how long a batch can be.

    python benchmarks/memory.py sweep --model llama-3.1-8b --shape 4x2048 --out benchmarks/results/memory-sweep.json
    python benchmarks/memory.py longest --model llama-3.1-8b --within 24GiB --out benchmarks/results/longest-24.json

sweep: the same steps under ten budgets, from the smallest that can be kept to all there is: median step, peak of a warm step, what was predicted.
longest: one row, longer and longer, a whole training step each, while the device is held to `--within`. Random weights and tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tunecompile
from tunecompile.compare.data import random_batches
from tunecompile.compare.loops import Batch, to_device
from tunecompile.compare.machine import header
from tunecompile.compare.meters import GIB, WARMUP, median, memory_figures, reset_memory
from tunecompile.compare.models import load_model, precision
from tunecompile.compare.shapes import SHAPES
from tunecompile.compare.spec import Job, parse_shape
from tunecompile.memory.gauge import HostGauge, budget_bytes

BUDGETS = 10
GROWTH = 1.25  #: of a row that fitted, for the next one


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, text in (("sweep", "step time under ten budgets"), ("longest", "the longest row that fits")):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
        kind.add_argument("--mode", choices=("qlora", "lora", "full"), default="qlora")
        kind.add_argument("--layers", type=int, help="so many layers only")
        kind.add_argument("--out", type=Path, required=True)
        if name == "sweep":
            kind.add_argument("--shape", default="4x2048", help="ROWSxLENGTH")
            kind.add_argument("--steps", type=int, default=5, help=f"timed, after {WARMUP} that are not")
        else:
            kind.add_argument("--within", default="24GiB", help="what the process may take of the device")
            kind.add_argument("--begin", type=int, default=8192, help="tokens of the first row")
            kind.add_argument("--end", type=int, default=1 << 20, help="tokens of the longest row that is tried")
    return parser.parse_args()


class Bench:
    """One model, trained again and again under other budgets."""

    def __init__(self, given: argparse.Namespace):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = "bfloat16" if self.device == "cuda" else "float32"
        self.job = Job(system="hf", model=given.model, mode=given.mode, trainer="loop", shapes=(), lr=1e-4, device=self.device, dtype=dtype, layers=given.layers)
        self.model = load_model(self.job).train()
        self.executor = "inductor" if self.device == "cuda" else "eager"

    def batches(self, shape: str, count: int) -> list[Batch]:
        made = random_batches(parse_shape(shape), self.model.config.vocab_size, self.job, self.job.seed, count)
        return [to_device(batch, self.device) for batch in made]

    def train(self, memory: Any, batches: list[Batch]) -> dict[str, Any]:
        """Steps under one budget: figures of those after the first `WARMUP`."""
        tunecompile.optimize(self.model, memory=memory, executor=self.executor)
        optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=self.job.lr, weight_decay=0.0, fused=True)
        times, losses = [], []
        try:
            for number, batch in enumerate(batches):
                if number == min(WARMUP, len(batches) - 1):
                    reset_memory(self.device)
                begun = time.perf_counter()
                with precision(self.job):
                    loss = self.model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.item())
                times.append((time.perf_counter() - begun) * 1e3)
            report = tunecompile.report(self.model)
            return {"status": "ok", **self._figures(times), **memory_figures(self.device), "losses": losses, "plan": report.memory, "notes": report.notes}
        except torch.OutOfMemoryError as error:
            return {"status": "oom", "reason": str(error).splitlines()[0]}
        finally:
            tunecompile.restore(self.model)
            self.model.zero_grad(set_to_none=True)
            del optimizer
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def _figures(self, times: list[float]) -> dict[str, Any]:
        timed = times[min(WARMUP, len(times) - 1):]
        return {"repeats": len(timed), "step_ms": {"median": median(timed), "min": min(timed), "max": max(timed)}, "first_step_s": times[0] / 1e3}


def sweep(given: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """All there is first: what it needs gives the range of the others."""
    bench = Bench(given)
    batches = bench.batches(given.shape, WARMUP + given.steps)
    tokens = batches[0]["input_ids"].numel()
    rows = []

    def measure(label: str, memory: Any) -> dict[str, Any]:
        row = {"system": f"tunecompile@{label}", "model": given.model, "mode": given.mode, "shape": given.shape,
               "budget_gib": memory / GIB if isinstance(memory, int) else None, **bench.train(memory, batches)}
        if row["status"] == "ok":
            row["tokens_per_s"] = tokens / row["step_ms"]["median"] * 1e3
        rows.append(row)
        show(rows, console)
        return row

    free = measure("none", None)
    with precision(bench.job):
        estimate = tunecompile.estimate(bench.model, tuple(batches[0]["input_ids"].shape), memory=1 << 20)  # nothing fits: the smallest plan there is
    low, high = 1.02 * estimate.peak, 1.3 * free["peak_gib"] * GIB
    for step in range(BUDGETS):
        budget = int(low * (high / low) ** (step / (BUDGETS - 1)))
        measure(f"{budget / GIB:.1f}GiB", budget)
    return rows


def longest(given: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Longer rows until one does not fit; then half way between the last two."""
    within = budget_bytes(given.within, HostGauge())
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(min(1.0, within / torch.cuda.get_device_properties(0).total_memory))
    bench, rows, fitted, length = Bench(given), [], 0, given.begin
    while fitted < length <= given.end:
        row = {"system": "tunecompile", "model": given.model, "mode": given.mode, "shape": f"1x{length}", "budget_gib": within / GIB,
               **bench.train(given.within, bench.batches(f"1x{length}", 1))}
        rows.append(row)
        show(rows, console)
        if row["status"] != "ok":
            failed = length
            length = (fitted + failed) // 2 // 1024 * 1024
            if not fitted or failed - fitted < 0.1 * fitted:
                break
            given.end = failed - 1
        else:
            fitted, length = length, min(int(GROWTH * length) // 1024 * 1024, given.end)
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    row = rows[-1]
    table = Table(box=None, show_header=len(rows) == 1)
    for name in ("system", "shape", "step, ms", "peak, GiB", "reserved", "predicted"):
        table.add_column(name, width=22 if name == "system" else 12)
    plan = row.get("plan") or {}
    figures = [f"{row['step_ms']['median']:.1f}", f"{row['peak_gib']:.2f}", f"{row['peak_reserved_gib'] or 0:.2f}",
               f"{plan['predicted_peak'] / GIB:.2f}" if plan else ""] if row["status"] == "ok" else [row["status"], "", "", ""]
    table.add_row(row["system"], row["shape"], *figures)
    console.print(table)


def main() -> None:
    given = parse_arguments()
    result = header()
    result["runs"] = {"sweep": sweep, "longest": longest}[given.kind](given, Console())
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
