"""What 8 bits do to a training: the demo's model and data in bf16, FP8 and INT8, several seeds, held-out losses. One JSON.

    python benchmarks/steps/eight_bits.py --out benchmarks/results/eight-bits-smollm2-135m-qlora.json     # 3 minutes on an H100
    python benchmarks/steps/eight_bits.py --steps 2 --seeds 1 --batch 2 --every 1 --held-out 4            # does it run?

    python benchmarks/steps/eight_bits.py --seeds 0 --batch 24 --out ...       # the errors of gradients alone: minutes on a CPU

Errors of gradients are those of one step with small random adapters, against fp32. Seeds draw other adapters and other orders of rows; held-out rows are the same. They are judged in the system's own precision. The model is
looked for in TUNECOMPILE_CACHE, and fetched into it (`make demo` does the same). `held_out_plain` is what the trained adapters give over the base as it is, by plain transformers. With --at-once 9 so
many trainings run at the same time, each in a process of its own: seconds then say little, and losses are the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._jobs import DEVICE
from benchmarks._results import write
from tunecompile.cli.compare import data, demo, gradients, loops, models
from tunecompile.cli.compare.machine import header
from tunecompile.cli.compare.spec import REFERENCE, Job
from tunecompile.cli.compare.tasks import held_out_loss
from tunecompile.verification.tolerance import compare_gradients

SYSTEMS = ("tunecompile", "tunecompile-fp8", "tunecompile-int8")
ROWS = Path(__file__).parents[1] / "data" / "wordnet.jsonl"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--every", type=int, default=40, help="steps between held-out losses")
    parser.add_argument("--held-out", type=int, default=96, help="rows")
    parser.add_argument("--mode", default="qlora", choices=("qlora", "lora"))
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no training is begun after so many")
    parser.add_argument("--at-once", type=int, default=1, help="trainings that run at the same time")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def train(job: Job, every: int, deadline: float) -> dict[str, Any] | None:
    """One training: the row of its result; None after the deadline."""
    if time.monotonic() > deadline:
        return None
    begin, tokenizer = time.monotonic(), models.load_tokenizer(job)
    split = data.split_rows(data.read_rows(str(job.data)), tokenizer, job)
    held_out = data.held_out_batches(split.held_out, tokenizer, job)
    model = models.apply_system(models.load_model(job), job).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=job.lr, weight_decay=0.0)
    curve, losses = [(0, held_out_loss(model, held_out, job))], []
    for step, batch in enumerate(data.make_batches(split.train, tokenizer, job, job.steps), 1):
        with models.precision(job):
            loss = loops.loss_of(model, loops.to_device(batch, job.device), job)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % every == 0:
            curve.append((step, held_out_loss(model, held_out, job)))
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    plain = models.load_model(job)
    plain.load_state_dict(trained, strict=False)
    return {
        "system": job.system,
        "model": demo.NAME,
        "mode": job.mode,
        "shape": f"{job.batch}x~{demo.LENGTH}",
        "seed": job.draw,
        "steps": job.steps,
        "status": "ok",
        "held_out": curve,
        "held_out_plain": held_out_loss(plain, held_out, job),
        "losses": torch.stack(losses).tolist(),
        "wall_s": time.monotonic() - begin,
    }


def errors_by_layer(job: Job, systems: list[str]) -> dict[str, list[float]]:
    """The error of each layer's median gradient, by system, on one batch of held-out rows."""
    tokenizer, dumped = models.load_tokenizer(job), {}
    rows = data.split_rows(data.read_rows(str(job.data)), tokenizer, job).held_out
    batch = data.collate_rows(rows[: job.batch], tokenizer, job)
    with tempfile.TemporaryDirectory() as folder:
        for system in (REFERENCE, *systems):
            own, path = job.replace(system=system), f"{folder}/{system}.pt"
            gradients.dump_gradients(models.apply_system(models.load_model(own), own).train(), batch, own, path)
            dumped[system] = torch.load(path, weights_only=True)["gradients"]
    found = {}
    for system in systems:
        layers: dict[int, list[float]] = {}
        for row in compare_gradients(dumped[REFERENCE], dumped[systems[0]], dumped[system], torch.bfloat16):
            layers.setdefault(int(re.findall(r"layers\.(\d+)\.", row["parameter"])[0]), []).append(row["error"])
        found[system] = [median(layers[layer]) for layer in sorted(layers)]
        print(f"{system}, error by layer:", *(f"{error:.3f}" for error in found[system]), flush=True)
    return found


def main() -> int:
    given, begin = parse_arguments(), time.monotonic()
    cache = demo.cache_folder()
    rows = dict(data=str(ROWS), batch=given.batch, seq_len=demo.LENGTH, pad_to=demo.LENGTH, too_long="drop")
    how = dict(mode=given.mode, trainer="loop", steps=given.steps, lr=5e-4, device=DEVICE, dtype="bfloat16")
    job = Job("hf", str(demo.fetch_model(cache)), held_out=given.held_out, **rows, **how)
    systems = given.systems.split(",")
    result: dict[str, Any] = {**header(), "runs": [], "errors_by_layer": errors_by_layer(job, systems)}
    todo = [job.replace(system=system, repeat=seed) for seed in range(given.seeds) for system in systems]
    with ProcessPoolExecutor(given.at_once, multiprocessing.get_context("spawn")) as workers:
        begun = {workers.submit(train, each, given.every, begin + given.seconds): each for each in todo}
        for done in as_completed(begun):
            if (row := done.result()) is None:
                continue
            todo.remove(begun[done])
            result["runs"].append(row)
            losses = " ".join(f"{loss:.4f}" for _, loss in row["held_out"])
            print(
                f"{row['system']}, seed {row['seed']}, {row['wall_s']:.0f} s: {losses}, plain {row['held_out_plain']:.4f}",
                flush=True,
            )
            if given.out:
                write(given.out, result, [f"{each.system}, seed {each.draw}" for each in todo])
    if given.out and not todo:
        write(given.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
