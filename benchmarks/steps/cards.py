"""What small cards train: for each of their memories the tokens/s of a row, and the longest row that was tried and fits.

    python benchmarks/steps/cards.py --model llama-3.1-8b --within 7.5GiB,11GiB,15GiB --host-embedding --out benchmarks/results/cards-llama-3.1-8b-qlora.json
    python benchmarks/steps/cards.py --model llama-3.2-1b --mode full --within 11GiB --out benchmarks/results/cards-llama-3.2-1b-full.json
    python benchmarks/steps/cards.py --model gpt-oss-20b --within 15GiB --no-experts --out benchmarks/results/cards-gpt-oss-20b-qlora.json

The process, CUDA's context included, is held to each memory in turn. The longest row is as long as `tunecompile.estimate` says, at most `--end`; where
it does not fit, a sixth shorter. Speeds are this device's: a smaller card is slower. Random weights and tokens; one process for all memories of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._results import write
from benchmarks.steps import longest
from tunecompile.cli.compare.machine import header
from tunecompile.cli.compare.meters import GIB
from tunecompile.planner.device_memory import HostGauge, budget_bytes, gauge_of

ROW = 2048  #: tokens of the row whose speed is told for each memory
SETTLING = 10  #: steps in which plans are made anew by what the first ones took, and CUDA graphs are recorded
TIMED = 3  #: steps behind these, of which the median counts
SHORTER = 5 / 6  #: of a row that did not fit, for the next one
TRIES = 3  #: rows


def hold(device: torch.device, within: int) -> None:
    """Hold this process to so many bytes of the device."""
    if device.type != "cuda":
        return
    gauge = gauge_of(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (within - gauge.outside()) / gauge.total()))


def measure(bench: longest.Bench, within: str) -> Iterator[dict[str, Any]]:
    """A row of `ROW` tokens and the longest one, under one memory."""
    nbytes = budget_bytes(within, HostGauge())
    hold(torch.device(bench.device), nbytes)
    bench.given.within = within
    about = {"system": "tunecompile", "model": bench.given.model, "mode": bench.given.mode}
    about |= {"experts": bench.given.experts, "host_embedding": bench.given.host_embedding, "budget_gib": nbytes / GIB}
    yield {**about, "shape": f"1x{ROW}", **bench.train(ROW, TIMED, SETTLING)}
    length = bench.guess()
    for _ in range(TRIES):
        if length <= ROW:
            break
        row = bench.train(length, 1, 1)  # (no more: a step may take half a minute)
        yield {**about, "shape": f"1x{length}", **row}
        if row["status"] == "ok":
            break
        length = int(SHORTER * length) // longest.STEP * longest.STEP


def main() -> None:
    given = longest.parse_arguments(end=1 << 15)
    result: dict[str, Any] = {**header(), "runs": []}
    bench, console = longest.Bench(given), Console()
    memories = given.within.split(",")
    for place, within in enumerate(memories):
        for row in measure(bench, within):
            result["runs"].append(row)
            longest.show(result["runs"], console)
            write(given.out, result, [f"longest row within {within}", *memories[place + 1 :]])
        write(given.out, result, memories[place + 1 :])
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
