"""Evaluation between training steps: time and peak of a batch, beside those of a training step of that size. One JSON.

    python benchmarks/steps/evaluation.py --model llama-3.1-8b --shape 8x2048 --systems hf,unsloth,tunecompile \\
        --seconds 500 --out benchmarks/results/evaluation-llama-3.1-8b-qlora.json

QLoRA of random weights in a plain loop; each system has a process of its own, and its row is written when it ends. A process trains
a few steps, and then evaluates other batches of the same shape: `model.eval()`, no gradients, labels, the loss alone is read.
`step_ms`, `tokens_per_s`, `peak_gib` and `first_step_s` are the evaluation's, `training` has those of the training steps.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._results import ENVIRONMENT, print_row, run_apart, save_packed, system_apart
from tunecompile.cli.compare.spec import Job, parse_shape, system


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shape", default="8x2048", help="ROWSxLENGTH, or padded-ROWSxLENGTH")
    parser.add_argument("--systems", default="hf,unsloth,tunecompile")
    parser.add_argument("--steps", type=int, default=6, help="training steps, and batches that are evaluated then")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of it may take")
    parser.add_argument("--logs", type=Path, help="folder for the processes' output")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the process of one system
    return parser.parse_args()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The row of one system, in this process."""
    if system(given.systems).engine == "unsloth":
        import unsloth  # noqa: F401
    import torch

    from tunecompile.cli.compare import data, loops, models
    from tunecompile.cli.compare.meters import StepClock, memory_figures, reset_memory

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    job = Job(system=given.systems, model=given.folder, trainer="loop", dtype=dtype, device=device)
    model = models.apply_system(models.load_model(job), job)
    loops.enable_checkpointing(model, job)
    vocabulary = model.config.get_text_config().vocab_size
    batches = data.random_batches(parse_shape(given.shape), vocabulary, job, job.seed, 2 * given.steps)

    reset_memory(device)
    trained = loops.train_loop(model, batches[: given.steps], job, "training")
    training = trained.clock.figures() | memory_figures(device)
    model.zero_grad(set_to_none=True)
    reset_memory(device)
    clock = StepClock(device, "evaluation", given.steps)
    model.eval()
    for batch in batches[given.steps :]:
        tokens, batch = loops.real_tokens(batch), loops.to_device(batch, device)
        clock.begin(tokens)
        with torch.no_grad():
            loss = trained.forward(batch)
        clock.end(loss)
    if system(given.systems).engine == "tunecompile":
        import tunecompile

        print(tunecompile.report(model))
    return {"status": "ok", **clock.figures(), **memory_figures(device), "training": training}


def run(given: argparse.Namespace, name: str, folder: str, seconds: float) -> dict[str, Any]:
    """The row of one system, from a process of its own."""
    options = ("model", "shape", "steps")
    return system_apart(given, __file__, name, options, seconds, "--folder", folder)


def main() -> int:
    given = parse_arguments()
    os.environ |= ENVIRONMENT
    if given.folder:
        print_row(measure(given))
        return 0
    about = {"model": given.model, "mode": "qlora", "shape": given.shape, "trainer": None, "budget_gib": None}
    about |= {"layers": given.layers} if given.layers else {}
    cases = {
        name: about | {"system": name, "checkpointing": Job(system=name, model=given.model).checkpoints}
        for name in given.systems.split(",")
    }

    def tell(row: dict[str, Any]) -> str:
        training = row["training"]
        return (
            f"{row['step_ms']['median']:.1f} ms, {row['peak_gib']:.1f} GiB; "
            f"training {training['step_ms']['median']:.1f} ms, {training['peak_gib']:.1f} GiB"
        )

    save = partial(save_packed, given)
    return run_apart(given, cases, save, run=lambda name, *rest: run(given, name, *rest), tell=tell)


if __name__ == "__main__":
    raise SystemExit(main())
