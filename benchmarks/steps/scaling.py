"""The same work on one GPU and on several, every GPU with as many rows: one JSON in the common shape.

    python benchmarks/steps/scaling.py --model llama-3.1-8b --mode qlora --shape 4x2048 --gpus 1,2 --systems hf,tunecompile \\
        --out benchmarks/results/scaling-llama-3.1-8b-qlora.json
    python benchmarks/steps/scaling.py --mode full --parallel fsdp2 --gpus 2 --systems hf,compile-layers,tunecompile --out ...
    python benchmarks/steps/scaling.py --parallel alone,ddp --gpus 2 --systems tunecompile --out ...

A system on several GPUs is a process for each, started by torchrun, under DDP, FSDP2 or ZeRO-3; under device_map it is one process, with as many rows as one GPU has. "alone" is a process on
each GPU that knows nothing of the others: what several GPUs can do at most, the slower one of them and the power that they share included. Tokens a second are those of all GPUs together.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._jobs import add_loop_options, loop_job
from benchmarks.steps.end_to_end import show
from tunecompile.cli.compare.judge import passed
from tunecompile.cli.compare.meters import WARMUP
from tunecompile.cli.compare.request import Comparison
from tunecompile.cli.compare.run import run_comparison
from tunecompile.cli.compare.spec import PARALLEL, resolve_systems


def engines(text: str) -> list[str]:
    chosen = text.split(",")
    if wrong := [name for name in chosen if name not in PARALLEL]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: there are {', '.join(PARALLEL)}")
    return chosen


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loop_options(parser)
    parser.add_argument("--shape", default="4x2048", help="of each GPU's batch")
    parser.add_argument("--gpus", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--parallel", type=engines, default=["ddp"], help="on several: " + ", ".join(PARALLEL))
    parser.add_argument("--systems", default="hf,tunecompile")
    parser.add_argument("--steps", type=int, default=8, help=f"timed steps, after {WARMUP} that are not")
    parser.add_argument(
        "--check", action="store_true", help="losses and gradients of two such layers, on one GPU, against fp32"
    )
    parser.add_argument("--keep-caches", action="store_true", help="leave the compiler's caches warm")
    parser.add_argument("--logs", type=Path, help="folder for the processes' logs")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    given = parse_arguments()
    job = loop_job(
        given,
        shapes=(given.shape,),
        steps=WARMUP + given.steps,
        trust_cache=given.keep_caches,
        saved_bytes=False,
        launches=False,
    )
    logs = given.logs or Path(tempfile.mkdtemp(prefix="tunecompile-logs-"))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict = {}
    for gpus, parallel in (
        (count, parallel) for count in given.gpus for parallel in (given.parallel if count > 1 else given.parallel[:1])
    ):
        where = f"on {gpus}" + f" by {parallel}" * (gpus > 1)
        comparison = Comparison(
            resolve_systems(given.systems, False),
            job.replace(gpus=gpus, parallel=parallel),
            logs / where.replace(" ", "-"),
            name=given.model,
            check=given.check and not result,
            listen=show,
        )
        found = run_comparison(comparison)
        result = (
            {
                **result,
                "runs": [*result["runs"], *found["runs"]],
                "verdicts": [*result["verdicts"], *(v | {"name": f"{where}: {v['name']}"} for v in found["verdicts"])],
            }
            if result
            else found
        )
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        for run in found["runs"]:
            print(
                f"{run['system']:<24}{where:<20}{run['shape']:<12}"
                + (
                    f"{run['tokens_per_s']:>10,.0f} tok/s  {run['step_ms']['median']:>9.1f} ms  {run['peak_gib']:6.2f} GiB"
                    if run["status"] == "ok"
                    else run["status"]
                ),
                flush=True,
            )
    print(f"written to {given.out}; logs in {logs}")
    return 0 if passed(result) else 1


if __name__ == "__main__":
    raise SystemExit(main())
