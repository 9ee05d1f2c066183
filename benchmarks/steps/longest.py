"""How long a batch can be: one row, a whole training step, while the device is held to so many bytes.

    python benchmarks/steps/longest.py --model llama-3.1-8b --within 24GiB --out benchmarks/results/longest-24.json
    python benchmarks/steps/longest.py --model llama-3.3-70b --within 120GiB --memory 1GiB --lengths 16384,32768,65536 --out benchmarks/results/peaks-70b.json

The first row is as long as `tunecompile.estimate` says, or `--begin`; rows grow until one does not fit. With `--lengths` these are the rows. A `--memory`
below the smallest plan runs that plan: what a row takes at least. Random weights and tokens. Every row is one step, compilation included. Time against memory is what `budgets.py` measures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile
from benchmarks._jobs import DEVICE, add_loop_options, loop_job
from benchmarks._results import write
from tunecompile.cli.compare.data import random_batches
from tunecompile.cli.compare.loops import to_device
from tunecompile.cli.compare.machine import header
from tunecompile.cli.compare.meters import GIB, memory_figures, reset_memory
from tunecompile.cli.compare.models import load_model, precision
from tunecompile.cli.compare.spec import parse_shape
from tunecompile.planner.device_memory import HostGauge, budget_bytes

GROWTH = 1.08  #: of a row that fitted, for the next one
SURE = 0.97  #: of what is estimated to fit, for the first one
STEP = 1024  #: tokens


def parse_arguments(end: int = 1 << 20) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loop_options(parser)
    parser.add_argument("--within", default="24GiB", help="what the process may take of the device")
    parser.add_argument("--memory", help="the budget that is planned for; what the process may take, if not given")
    parser.add_argument(
        "--host-memory", help="what may wait on the host, such as 100GiB; half of what is available, if not given"
    )
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(length) for length in text.split(",")],
        help="tokens of all rows, such as 16384,32768",
    )
    parser.add_argument("--host-embedding", action="store_true", help="as optimize(host_embedding=True)")
    parser.add_argument("--no-experts", dest="experts", action="store_false", help="no adapters on experts")
    parser.add_argument("--begin", type=int, help="tokens of the first row; what is estimated to fit, if not given")
    parser.add_argument("--end", type=int, default=end, help="tokens of the longest row that is tried")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


class Bench:
    """One model, trained for one step a row."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.device = given, DEVICE
        self.job = loop_job(given, shapes=(), experts=given.experts)
        self.model = load_model(self.job).train()

    def guess(self) -> int:
        """Tokens that should fit."""
        given = self.given
        with precision(self.job):
            told = tunecompile.estimate(
                self.model,
                (1, given.end),
                memory=given.within,
                host_memory=given.host_memory,
                host_embedding=given.host_embedding,
            )
        return given.end if told.fits else int(SURE * told.fitting_tokens) // STEP * STEP

    def train(self, length: int, timed: int = 0, settling: int = 0) -> dict[str, Any]:
        """A step, and what it took; and the median of further ones. settling: steps between, that are not timed."""
        batch = to_device(
            random_batches(parse_shape(f"1x{length}"), self.model.config.vocab_size, self.job, self.job.seed, 1)[0],
            self.device,
        )
        tunecompile.optimize(
            self.model,
            memory=self.given.memory or self.given.within,
            host_memory=self.given.host_memory,
            host_embedding=self.given.host_embedding,
            executor="inductor" if self.device == "cuda" else "eager",
        )
        optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=self.job.lr, weight_decay=0.0, fused=True
        )
        reset_memory(self.device)
        times = []
        try:
            for _ in range(1 + settling + timed):
                begun = time.perf_counter()
                with precision(self.job):
                    loss = self.model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                told = loss.item()
                times.append(time.perf_counter() - begun)
            report = tunecompile.report(self.model)
            return {
                "status": "ok",
                "first_step_s": times[0],
                **({"tokens_per_s": length / median(times[-timed:]), "step_s": times[1:]} if timed else {}),
                **memory_figures(self.device),
                "losses": [told],
                "memory": report.memory,
                "notes": report.notes,
            }
        except torch.OutOfMemoryError as error:
            return {"status": "oom", "reason": str(error).splitlines()[0]}
        finally:
            tunecompile.restore(self.model)
            self.model.zero_grad(set_to_none=True)
            del optimizer
            if self.device == "cuda":
                torch.cuda.empty_cache()


def run(given: argparse.Namespace, result: dict[str, Any], console: Console) -> None:
    """The rows that were asked for, or those that find the longest."""
    within = budget_bytes(given.within, HostGauge())
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(min(1.0, within / torch.cuda.get_device_properties(0).total_memory))
    bench = Bench(given)

    def fits(length: int) -> bool:
        row = {
            "system": "tunecompile",
            "model": given.model,
            "mode": given.mode,
            "shape": f"1x{length}",
            "budget_gib": within / GIB,
            **bench.train(length),
        }
        result["runs"].append(row)
        show(result["runs"], console)
        write(given.out, result)
        return row["status"] == "ok"

    if given.lengths:
        for length in given.lengths:
            fits(length)
    else:
        longest(given.begin or bench.guess(), given.end, fits)


def longest(length: int, end: int, fits: Callable[[int], bool]) -> None:
    """Longer rows until one does not fit, then half way between the last two, until they are a tenth apart."""
    fitted, failed = 0, end + 1
    while fitted < length < failed:
        fitted, failed = (length, failed) if fits(length) else (fitted, length)
        if failed <= end and failed - fitted <= 0.1 * failed:
            break
        length = int(min(GROWTH * fitted, end) if failed > end else (fitted + failed) / 2) // STEP * STEP


def show(rows: list[dict[str, Any]], console: Console) -> None:
    row = rows[-1]
    table = Table(box=None, show_header=len(rows) == 1)
    for name in ("shape", "step, s", "peak, GiB", "reserved", "predicted"):
        table.add_column(name, width=12)
    plan = row.get("memory") or {}
    figures = (
        [
            f"{row['first_step_s']:.1f}",
            f"{row['peak_gib']:.2f}",
            f"{row['peak_reserved_gib'] or 0:.2f}",
            f"{plan['predicted_peak'] / GIB:.2f}" if plan else "",
        ]
        if row["status"] == "ok"
        else [row["status"], "", "", ""]
    )
    table.add_row(row["shape"], *figures)
    console.print(table)
    if "reason" in row:
        console.print(row["reason"], style="yellow")


def main() -> None:
    given = parse_arguments()
    run(given, {**header(), "runs": []}, Console())
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
