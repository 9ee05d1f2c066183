"""Training steps of known architectures (random weights, random tokens), side by side: one JSON in the common shape.

    python benchmarks/steps/end_to_end.py --model llama-3.1-8b --mode qlora --shapes 4x2048,2x512 \\
        --systems hf,compile,liger,unsloth-no-checkpoint,unsloth,tunecompile --steps 5 --out benchmarks/results/NAME.json

    python benchmarks/steps/end_to_end.py --shapes padded-8x512 --systems hf,unsloth-no-checkpoint,unsloth-padding-free,tunecompile --out ...

`padded-8x512` is 8 rows whose lengths are drawn as those of real data, none beyond 512, padded to the longest of the batch; tokens/s
count real tokens, and unsloth-padding-free gets the same rows as one without padding.

Each system has a process of its own, and with --rounds 2 each has two, in alternating order. On a GPU all of them import their
packages at the same time, before the first uses the GPU. Losses and gradients of the same layers, two of them, are first checked
against fp32 unless --no-check is given. The file is written after each timed row; until all has ended, its field "incomplete" names
what is to come, and report.py leaves it out. With --seconds N what runs after N seconds is ended; rows without time say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._jobs import add_loop_options, loop_job
from benchmarks._results import write
from tunecompile.cli.compare.judge import passed
from tunecompile.cli.compare.meters import WARMUP
from tunecompile.cli.compare.request import Comparison
from tunecompile.cli.compare.run import run_comparison
from tunecompile.cli.compare.spec import Job, resolve_systems


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loop_options(parser)
    parser.add_argument("--shapes", default="4x2048")
    parser.add_argument("--systems", default="hf,compile,liger,unsloth-no-checkpoint,unsloth,tunecompile")
    parser.add_argument("--steps", type=int, default=5, help=f"timed steps, after {WARMUP} that are not")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="that all of it may take")
    parser.add_argument("--rank", type=int, default=Job.rank, help="of adapters")
    parser.add_argument("--no-experts", action="store_true", help="no adapters on stacks of experts' weights")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--keep-caches", action="store_true", help="leave the compiler's caches warm")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="the first step of compiling systems also in a second process, which finds the caches filled",
    )
    parser.add_argument("--logs", type=Path, help="folder for the processes' logs")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def show(system: str, event: str, fields: dict) -> None:
    if event in ("turn", "kept"):
        return
    if event == "step" and fields["step"] in (1, fields["steps"]):
        print(f"{system} {fields['label']}: step {fields['step']} took {fields['seconds']:.2f} s", flush=True)
    elif event != "step":
        print(f"{system}: {fields.get('text') or fields.get('status')}", flush=True)


def main() -> int:
    given = parse_arguments()
    deadline = time.monotonic() + given.seconds if given.seconds else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # the processes end, too
    job = loop_job(
        given,
        shapes=tuple(given.shapes.split(",")),
        steps=WARMUP + given.steps,
        rank=given.rank,
        experts=not given.no_experts,
        checkpointing=given.gradient_checkpointing,
        trust_cache=given.keep_caches,
        **({"dtype": given.dtype} if given.dtype else {}),
    )
    systems = resolve_systems(given.systems, given.gradient_checkpointing)
    logs = given.logs or Path(tempfile.mkdtemp(prefix="tunecompile-logs-"))
    keep = functools.partial(write, given.out)

    comparison = Comparison(
        systems,
        job,
        logs,
        name=given.model,
        check=not given.no_check,
        warm=given.warm,
        keep=keep,
        deadline=deadline,
        listen=show,
    )
    result = run_comparison(comparison)
    for number in range(1, given.rounds):
        keep(result, [f"round {number + 1}"])
        order = systems[::-1] if number % 2 else systems
        again = run_comparison(
            dataclasses.replace(comparison, systems=order, check=False, warm=False, keep=lambda _: None)
        )
        result["runs"] += [run | {"order": run["order"] + number * len(systems)} for run in again["runs"]]
    keep(result)
    for run in result["runs"]:
        figures = (
            f"{run['tokens_per_s']:>10,.0f} tok/s  {run['step_ms']['median']:>9.1f} ms  {run['peak_gib']:6.2f} GiB  first {run['first_step_s']:6.1f} s"
            + (f", warm {run['first_step_warm_s']:.1f} s" if "first_step_warm_s" in run else "")
            if run["status"] == "ok"
            else run["status"]
        )
        print(f"{run['system']:<24}{run['shape']:<16}{figures}")
    for system, parts in result["spent_s"].items():
        print(f"seconds of {system}: " + ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items()))
    for verdict in result["verdicts"]:
        print(f"{'pass' if verdict['passed'] else 'FAIL'}  {verdict['name']}: {verdict['detail']}")
    print(f"written to {given.out}; logs in {logs}")
    return 0 if passed(result) else 1


if __name__ == "__main__":
    raise SystemExit(main())
