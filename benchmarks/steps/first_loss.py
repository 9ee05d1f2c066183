"""How long the first loss takes, and all steps until there is code: eager, without caches, with them, in the background. One JSON.

    python benchmarks/steps/first_loss.py --model llama-3.1-8b --mode qlora --layers 4 --shapes 4x2048 --steps 40 --out FILE
    python benchmarks/steps/first_loss.py --model llama-tiny --mode lora --shapes 2x64,3x48 --kinds eager,cold,background

The model is random weights of a known architecture, and shapes come in turn. Each run is a process of its own: `cold` and
`background` have an empty folder of caches each, `warm` has cold's. A run ends when it has done its steps and all of its regions
have their code. Times begin when the model is on the device and `optimize` is done, with libraries imported.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._jobs import DEVICE, loop_job
from benchmarks._results import print_row, printed_rows, write
from benchmarks.steps.compile_time import Stopwatch

KINDS = ("eager", "cold", "warm", "background")
LAST = 5  #: steps that say how long one takes in the end
PATIENCE = 300  #: seconds in which regions get their code


def parse_arguments() -> argparse.Namespace:
    from tunecompile.estimate.known_shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--mode", choices=("qlora", "lora", "full"), default="qlora")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shapes", default="4x2048", help="steps have them in turn")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}; warm after cold")
    parser.add_argument("--profile", type=Path, help="write what cProfile sees of the last kind's first forward here")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row of one kind, in this process."""
    import tunecompile
    from tunecompile.cli.compare.models import load_model

    model = load_model(loop_job(given, shapes=tuple(given.shapes.split(",")), steps=given.steps)).train()
    torch.ones(1, device=DEVICE).sum().item()  # the GPU's context is not compilation
    if given.child != "eager":
        begin = time.perf_counter()
        tunecompile.optimize(model, warmup="background" if given.child == "background" else None)
        print(f"optimize took {time.perf_counter() - begin:.2f} s", flush=True)
    losses, seconds, firsts, waited, watch = [], [], [], [], Stopwatch()
    shapes = [tuple(map(int, shape.split("x"))) for shape in given.shapes.split(",")]
    vocabulary = model.config.get_text_config().vocab_size
    until = time.monotonic() + PATIENCE
    while len(seconds) < given.steps or (True in waited[-LAST - 1 :] and time.monotonic() < until):
        torch.manual_seed(len(seconds))
        ids = torch.randint(vocabulary, shapes[len(seconds) % len(shapes)], device=DEVICE)
        begin = time.perf_counter()
        with contextlib.ExitStack() as around:
            if given.child != "eager" and not seconds:
                around.enter_context(watch.running())
            if given.profile and not seconds:
                profile = around.enter_context(cProfile.Profile())
            if DEVICE == "cuda":
                around.enter_context(torch.autocast(DEVICE, torch.bfloat16))
            loss = model(input_ids=ids, labels=ids).loss
            losses.append(loss.item())
        if given.profile and not seconds:
            profile.dump_stats(given.profile)
        firsts.append(time.perf_counter() - begin)
        loss.backward()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        waited.append(given.child == "background" and "waits-for-code" in _kinds(tunecompile.report(model)))
    settled = len(waited) - waited[::-1].index(True) if True in waited else 0
    last = [1e3 * each for each in seconds[-LAST:]]
    row = {
        "system": "hf" if given.child == "eager" else "tunecompile",
        "kind": given.child,
        "status": "ok" if not waited[-1] else f"no code after {PATIENCE} s",
        "first_loss_s": round(firsts[0], 3),
        "first_step_s": round(seconds[0], 3),
        "steps": len(seconds),
        "steps_s": [round(each, 4) for each in seconds],
        "all_s": round(sum(seconds[: given.steps]), 3),
        "step_ms": {"median": statistics.median(last), "min": min(last), "max": max(last)},
        "losses": [round(each, 5) for each in losses],
        "phases": watch.taken(),  # of the first forward
    }
    if given.child == "background":
        waiting = [each for each, still in zip(seconds[1:], waited) if still]
        row |= {
            "settled_step": settled + 1,
            "settled_s": round(sum(seconds[: settled + 1]), 3),
            "waiting_ms": round(1e3 * statistics.median(waiting), 2) if waiting else None,
            "changed_over": {each.name: each.changed_over for each in tunecompile.report(model).regions},
        }
    if DEVICE == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return row


def _kinds(report: Any) -> set[str]:
    return {each.code for each in report.notes}


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['model']} {row['kind']}: first loss after {row['first_loss_s']:.2f} s, first step {row['first_step_s']:.2f} s; "
        f"{row['requested_steps']} steps in {row['all_s']:.1f} s, at last {row['step_ms']['median']:.1f} ms"
    )
    if "settled_step" in row:
        longest = max(row["steps_s"][1:])
        print(
            f"  all code at step {row['settled_step']} after {row['settled_s']:.1f} s; a step before took {row['waiting_ms']} ms, "
            f"the longest after the first {longest:.2f} s"
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
                result["runs"].append({**fields, "requested_steps": given.steps, **row})
                show(result["runs"][-1])
                if given.out:
                    write(given.out, result, kinds[place + 1 :])
            if child.wait():
                return child.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
