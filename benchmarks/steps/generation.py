"""Generation between training steps: a plain model and an optimized one, with each kind of cache. One JSON.

    python benchmarks/steps/generation.py --model llama-3.1-8b --layers 8 \\
        --out benchmarks/results/generation-llama-3.1-8b-lora.json

Random weights with LoRA. One model is optimized and trained for some steps; the other one is a copy that gets its
adapters. Both then generate from the same prompts in turn, greedily, and the adapters change once more. `paged` is
transformers' continuous batching.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile
from benchmarks._jobs import DEVICE, loop_job
from benchmarks._results import write
from tunecompile.cli.compare.data import random_batches
from tunecompile.cli.compare.loops import train_loop
from tunecompile.cli.compare.machine import header
from tunecompile.cli.compare.models import load_model
from tunecompile.cli.compare.spec import Job, parse_shape
from tunecompile.errors import summary
from tunecompile.estimate.known_shapes import SHAPES

CACHES = ("dynamic", "static", "paged")
STEPS = 4  #: of training, before anything is generated


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--mode", choices=("qlora", "lora"), default="lora")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="that are generated")
    parser.add_argument("--rounds", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def train(model: nn.Module, job: Job, vocabulary: int, steps: int) -> None:
    batches = random_batches(parse_shape(job.shapes[0]), vocabulary, job, job.seed, steps)
    train_loop(model, batches, job, "training")
    model.eval()


def hand_over(trained: nn.Module, plain: nn.Module) -> None:
    """Give the copy the weights that were trained."""
    with torch.no_grad():
        for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
            if ours.requires_grad:
                theirs.copy_(ours)


def generator(cache: str, prompts: Tensor, tokens: int) -> Callable[[nn.Module], list[list[int]]]:
    """A function that gives the new tokens of each prompt."""
    greedy = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}

    def at_once(model: nn.Module) -> list[list[int]]:
        settings = greedy if cache == "dynamic" else greedy | {"cache_implementation": cache}
        mask = torch.ones_like(prompts)
        return model.generate(prompts, attention_mask=mask, **settings)[:, prompts.shape[1] :].tolist()

    def by_blocks(model: nn.Module) -> list[list[int]]:
        from transformers import GenerationConfig

        settings = GenerationConfig(**greedy, eos_token_id=-1, pad_token_id=0)
        made = model.generate_batch(prompts.tolist(), generation_config=settings)
        return [made[name].generated_tokens for name in sorted(made, key=lambda name: int(name.rpartition("_")[2]))]

    return by_blocks if cache == "paged" else at_once


def timed(generate: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Milliseconds, and what was generated: it is on the host, so the device has ended."""
    begun = time.perf_counter()
    made = generate()
    return 1e3 * (time.perf_counter() - begun), made


@torch.no_grad()
def errors(systems: dict[str, nn.Module], prompts: Tensor) -> dict[str, float]:
    """The relative error of each system's logits against fp32, at the prompts' ends.

    (Tokens of random weights are near ties.)
    """
    wide = copy.deepcopy(systems["hf"]).float()(prompts).logits[:, -1]
    found = {name: model(prompts).logits[:, -1].float() for name, model in systems.items()}
    return {name: ((logits - wide).norm() / wide.norm()).item() for name, logits in found.items()}


def beside(
    systems: dict[str, nn.Module], generate: Callable[[nn.Module], list[list[int]]], rounds: int
) -> list[dict[str, Any]]:
    """A row for each system, timed in turn."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    made: dict[str, list[list[int]]] = {}
    for _ in range(1 + rounds):
        for name, model in systems.items():
            spent, made[name] = timed(lambda: generate(model))
            times[name].append(spent)
    count = sum(map(len, next(iter(made.values()))))
    return [
        {
            "system": name,
            "status": "ok",
            "ms": median(each[1:]),
            "all_ms": each,
            "tokens_per_s": 1e3 * count / median(each[1:]),
        }
        for name, each in times.items()
    ]


def main() -> int:
    given = parse_arguments()
    job = loop_job(given, shapes=("2x512" if DEVICE == "cuda" else "2x32",))
    model = load_model(job)
    plain = copy.deepcopy(model).eval()
    tunecompile.optimize(model, executor="inductor" if DEVICE == "cuda" else "eager")
    vocabulary = model.config.vocab_size
    prompts = torch.randint(3, vocabulary, (given.rows, given.prompt), device=DEVICE)
    result: dict[str, Any] = {**header(), "report": "", "runs": []}
    cases = [(cache, changed) for cache in given.caches.split(",") for changed in (False, True)]
    for place, (cache, changed) in enumerate(cases):
        train(model, job, vocabulary, 1 if changed else STEPS)
        hand_over(model, plain)
        about = {"model": given.model, "mode": given.mode, "layers": given.layers, "cache": cache, "changed": changed}
        about |= {"shape": f"{given.rows}x{given.prompt}+{given.tokens}"}
        generate = generator(cache, prompts, given.tokens)
        try:
            systems = {"hf": plain, "tunecompile": model}
            apart = errors(systems, prompts)
            rows = [row | {"error": apart[row["system"]]} for row in beside(systems, generate, given.rounds)]
        except Exception as error:  # the other caches are told
            rows = [{"system": "tunecompile", "status": f"error: {summary(error)}"}]
        result["runs"] += [about | row for row in rows]
        result["report"] = str(tunecompile.report(model))
        write(given.out, result, [" ".join(map(str, case)) for case in cases[place + 1 :]])
        for row in rows:
            told = f"{row['ms']:.1f} ms, error {row['error']:.1e}" if "ms" in row else row["status"]
            print(f"{cache}, adapters changed: {changed}, {row['system']}: {told}", flush=True)
    return 0 if all(row["status"] == "ok" for row in result["runs"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
