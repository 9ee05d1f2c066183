"""What a verified first step takes, and what it finds: gradients beside eager's, against fp32, for whole models.

    python benchmarks/steps/verification.py --models llama-3.1-8b,llama-3.2-1b --mode qlora --shape 4x2048 --out benchmarks/results/verified-qlora.json

Random weights and tokens. A few training steps come first, whose peak is what the verification's is compared with.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile
from tunecompile.cli.compare.data import random_batches
from tunecompile.cli.compare.loops import to_device
from tunecompile.cli.compare.machine import header
from tunecompile.cli.compare.meters import memory_figures, reset_memory
from tunecompile.cli.compare.models import load_model, precision, set_initial_adapter
from tunecompile.cli.compare.spec import Job, parse_shape
from tunecompile.estimate.known_shapes import SHAPES

STEPS = 3  #: of training, before


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-3.1-8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--mode", choices=("qlora", "lora", "full"), default="qlora")
    parser.add_argument("--shape", default="4x2048")
    parser.add_argument("--layers", type=int, help="so many layers only")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def verified(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One model: its row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = Job(
        system="hf",
        model=name,
        mode=given.mode,
        trainer="loop",
        shapes=(given.shape,),
        lr=1e-4,
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        layers=given.layers,
    )
    model = load_model(job).train()
    set_initial_adapter(model, job.seed, b_scale=0.02)
    tunecompile.optimize(model, executor="inductor" if device == "cuda" else "eager")
    batch = to_device(random_batches(parse_shape(given.shape), model.config.vocab_size, job, job.seed, 1)[0], device)
    reset_memory(device)
    with precision(job):
        for _ in range(STEPS):
            model.zero_grad(set_to_none=True)
            model(**batch).loss.backward()
    training = memory_figures(device)
    reset_memory(device)
    begun = time.perf_counter()
    with precision(job):
        result = tunecompile.verify(model, batch)
    row = {
        **result.to_dict(),
        "system": "tunecompile",
        "model": name,
        "mode": given.mode,
        "shape": given.shape,
        "status": "ok",
        "verify_s": time.perf_counter() - begun,
        **memory_figures(device),
        "training_peak_gib": training["peak_gib"],
    }
    print(
        f"{row['verify_s']:.1f} s, {row['peak_gib']:.2f} GiB where training takes {row['training_peak_gib']:.2f}\n{result}",
        flush=True,
    )
    return row


def main() -> None:
    given = parse_arguments()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    result = {**header(), "runs": []}
    for name in given.models.split(","):
        result["runs"].append(verified(name, given))
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
