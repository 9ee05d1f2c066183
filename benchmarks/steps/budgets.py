"""Step time against memory: one model under one budget after another, the other systems beside them.

    python benchmarks/steps/budgets.py --model llama-3.1-8b --shape 4x2048 --budgets 7GiB,8GiB,9GiB,10GiB,12GiB,14GiB,18GiB,24GiB,32GiB,48GiB \\
        --peers hf-checkpoint,liger-checkpoint,unsloth --out benchmarks/results/budgets.json

Random weights and tokens. Each peer has a process of its own; the budgets share one, which loads the model once. A budget below the smallest
plan runs that plan. What fits in how much is `longest.py`'s question.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile
from benchmarks._jobs import add_loop_options, loop_job
from tunecompile.cli.compare import data, loops, models
from tunecompile.cli.compare.assemble import assemble
from tunecompile.cli.compare.judge import Check
from tunecompile.cli.compare.meters import WARMUP
from tunecompile.cli.compare.progress import Progress
from tunecompile.cli.compare.request import Comparison
from tunecompile.cli.compare.run import run_comparison
from tunecompile.cli.compare.spec import Job, parse_shape, resolve_systems
from tunecompile.cli.compare.tasks import compiler_report, guarded, measured, predicted


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loop_options(parser)
    parser.add_argument("--shape", default="4x2048")
    parser.add_argument("--budgets", required=True, help="such as 8GiB,9.5GiB,0.9")
    parser.add_argument("--peers", default="", help="systems of end_to_end.py")
    parser.add_argument("--steps", type=int, default=5, help=f"timed steps, after {WARMUP} that are not")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def sweep(
    job: Job, names: list[str], keep: Callable[[dict[str, dict[str, Any]]], None] = lambda outcome: None
) -> dict[str, dict[str, Any]]:
    """A result a system, as of a process of its own. keep: is given all there are after each."""
    outcome, model = {}, models.load_model(job)
    for name in names:
        own = job.replace(system=name)
        models.apply_system(model, own)
        torch.manual_seed(job.seed)
        batches = data.random_batches(parse_shape(job.shapes[0]), model.config.vocab_size, own, job.seed, job.steps)
        run = {"shape": job.shapes[0]} | guarded(
            lambda: measured(model, own, lambda: loops.train_loop(model, batches, own, name), Progress())
        )
        run |= predicted(model, own, parse_shape(job.shapes[0]))
        outcome[name] = {
            "runs": [run],
            "attention": model.config._attn_implementation,
            "report": compiler_report(model, own),
        }
        keep(outcome)
        tunecompile.restore(model)
        model.zero_grad(set_to_none=True)
        models.set_initial_adapter(model, job.seed)
        torch._dynamo.reset()
        gc.collect()
        if job.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name:<24}{summary(run)}", flush=True)
    return outcome


def summary(run: dict[str, Any]) -> str:
    if run["status"] != "ok":
        return run["status"]
    return f"{run['tokens_per_s']:>10,.0f} tok/s  {run['step_ms']['median']:>9.1f} ms  {run['peak_gib']:6.2f} GiB  first {run['first_step_s']:6.1f} s"


def main() -> None:
    given = parse_arguments()
    job = loop_job(given, shapes=(given.shape,), steps=WARMUP + given.steps, launches=False, saved_bytes=False)
    budgets = resolve_systems(",".join(f"tunecompile@{budget}" for budget in given.budgets.split(",")), False)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tunecompile-budgets-") as logs:
        peers = resolve_systems(given.peers, False) if given.peers else []
        comparison = Comparison(peers, job, Path(logs), name=given.model, check=False)
        beside = run_comparison(comparison)["runs"] if peers else []
        for run in beside:
            print(f"{run['system']:<24}{summary(run)}", flush=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{logs}/caches"  # cold, as those of the others

        def keep(outcome: dict[str, dict[str, Any]]) -> None:
            result = assemble(
                dataclasses.replace(comparison, systems=[b for b in budgets if b.name in outcome]),
                outcome,
                None,
                Check(),
            )
            result["runs"] = beside + [run | {"order": run["order"] + len(beside)} for run in result["runs"]]
            given.out.write_text(json.dumps(result, indent=1) + "\n")

        sweep(job, [system.name for system in budgets], keep)
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
