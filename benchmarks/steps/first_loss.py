"""How long the first loss takes, and the first steps: eager, without caches, with them. One JSON.

    python benchmarks/steps/first_loss.py --model llama-3.1-8b --mode qlora --layers 4 --shapes 4x2048 --steps 40 --out FILE
    python benchmarks/steps/first_loss.py --model llama-tiny --mode lora --shapes 2x64,3x48 --kinds eager,cold

The model is random weights of a known architecture, and shapes come in turn. Each run is a process of its own: `cold` has an
empty folder of caches, and `warm` has cold's. Times begin when the model is on the device and `optimize` is done, with libraries
imported.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._jobs import DEVICE, add_loop_options, loop_job
from benchmarks._results import print_row, printed_rows, write
from benchmarks.steps.compile_time import Stopwatch
from tunecompile.cli.compare.spec import Job, parse_shape

KINDS = ("eager", "cold", "warm")
LAST = 5  #: steps that say how long one takes in the end


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loop_options(parser)
    parser.add_argument("--shapes", default="4x2048", help="steps have them in turn")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}; warm after cold")
    parser.add_argument("--profile", type=Path, help="write what cProfile sees of the last kind's first forward here")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


@dataclass
class Steps:
    """What was seen of each step."""

    first_losses: list[float] = field(default_factory=list)  #: seconds until its loss was there
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    watch: Stopwatch = field(default_factory=Stopwatch)  #: of the first forward


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row of one kind, in this process."""
    import tunecompile
    from tunecompile.cli.compare.models import load_model

    job = loop_job(given, shapes=tuple(given.shapes.split(",")), steps=given.steps)
    model = load_model(job).train()
    torch.ones(1, device=DEVICE).sum().item()  # the GPU's context is not compilation
    if given.child != "eager":
        tunecompile.optimize(model)

    steps = Steps()
    for _ in range(given.steps):
        train(model, job, given, steps)
    return row_of(given, steps)


def train(model: nn.Module, job: Job, given: argparse.Namespace, steps: Steps) -> None:
    """One more step, of the next shape."""
    from tunecompile.cli.compare.models import precision

    number = len(steps.seconds)
    shape = parse_shape(job.shapes[number % len(job.shapes)])
    torch.manual_seed(number)
    ids = torch.randint(model.config.get_text_config().vocab_size, (shape.rows, shape.length), device=DEVICE)
    begin = time.perf_counter()
    with contextlib.ExitStack() as around:
        if given.child != "eager" and not number:
            around.enter_context(steps.watch.running())
        if given.profile and not number:
            profile = around.enter_context(cProfile.Profile())
            around.callback(lambda: profile.dump_stats(given.profile))
        around.enter_context(precision(job))
        loss = model(input_ids=ids, labels=ids).loss
        steps.losses.append(loss.item())
        steps.first_losses.append(time.perf_counter() - begin)
    loss.backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    steps.seconds.append(time.perf_counter() - begin)


def row_of(given: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    """The row of a file of results."""
    seconds, last = steps.seconds, [1e3 * each for each in steps.seconds[-LAST:]]
    row = {
        "system": "hf" if given.child == "eager" else "tunecompile",
        "kind": given.child,
        "status": "ok",
        "first_loss_s": round(steps.first_losses[0], 3),
        "first_step_s": round(seconds[0], 3),
        "steps": len(seconds),
        "steps_s": [round(each, 4) for each in seconds],
        "all_s": round(sum(seconds), 3),
        "step_ms": {"median": median(last), "min": min(last), "max": max(last)},
        "losses": [round(each, 5) for each in steps.losses],
        "phases": steps.watch.taken(),
    }
    if DEVICE == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return row


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['model']} {row['kind']}: first loss after {row['first_loss_s']:.2f} s, first step {row['first_step_s']:.2f} s; "
        f"{row['steps']} steps in {row['all_s']:.1f} s, at last {row['step_ms']['median']:.1f} ms"
    )
    for region, phases in row["phases"].items():
        print(f"  {region.rpartition('_')[2]}: " + "  ".join(f"{phase} {taken:.2f}" for phase, taken in phases.items()))
    sys.stdout.flush()


def main() -> int:
    given = parse_arguments()
    if given.child:
        print_row(measure(given))
        return 0
    from tunecompile.cli.compare.machine import header

    result: dict[str, Any] = {**header(), "runs": []}
    kinds = given.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        sys.exit(f"unknown kinds: {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="tunecompile-first-loss-") as folder:
        for place, kind in enumerate(kinds):
            own = f"{folder}/{'cold' if kind == 'warm' else kind}"
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{own}/inductor", "TRITON_CACHE_DIR": f"{own}/triton"}
            command = [sys.executable, __file__, *sys.argv[1:], "--child", kind]
            child = subprocess.Popen(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True)
            fields = {"model": given.model, "mode": given.mode, "layers": given.layers, "shape": given.shapes}
            for row in printed_rows(child.stdout or ()):
                result["runs"].append({**fields, **row})
                show(result["runs"][-1])
                if given.out:
                    write(given.out, result, kinds[place + 1 :])
            if child.wait():
                return child.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
