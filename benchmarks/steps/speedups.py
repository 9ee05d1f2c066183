"""Steps of many families beside eager and beside plain torch.compile of the same layers: LoRA on all linears, autocast to bf16.

    python benchmarks/steps/speedups.py --out benchmarks/results/speedups.json
    python benchmarks/steps/speedups.py --families llama,gemma3 --out /tmp/two.json

A few layers of each family's real widths, random weights and tokens, no checkpointing. Every family is a process of its own, in which the systems take
their steps by turns: first all families at once, so that code is compiled, then each alone, so that nothing else runs while one is timed. From the
repository's root: families are those of its tests.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

import tunecompile
from tests.support import zoo
from tunecompile.cli.compare.machine import header
from tunecompile.runtime.layers.find_layers import find_layers

#: hidden size, width of the MLP, heads, heads of keys and values, and the size of a head where the config names it; each of a model people train
WIDTHS = {
    "llama": (4096, 14336, 32, 8),
    "qwen2": (3584, 18944, 28, 4),
    "qwen3": (4096, 12288, 32, 8, 128),
    "gemma2": (3584, 14336, 16, 8, 256),
    "gemma3": (2560, 10240, 8, 4, 256),
    "phi3": (3072, 8192, 32, 32),
    "granite": (4096, 12800, 32, 8),
    "olmo2": (4096, 11008, 32, 32),
    "cohere2": (4096, 14336, 32, 8),
    "smollm3": (2048, 11008, 16, 4),
    "starcoder2": (3072, 12288, 24, 2),
    "glm4": (4096, 13696, 32, 2, 128),
}
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
LAYERS, VOCABULARY, ROWS, LENGTH, STEPS = 6, 32768, 4, 1024, 8
SYSTEMS = ("eager", "compiled layers", "tunecompile")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(WIDTHS), help="all, if not given")
    parser.add_argument(
        "--processes",
        type=int,
        default=max(1, min(8, (os.cpu_count() or 1) // 2)),
        help="that compile at a time; 0: compile while measuring, in this process",
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def build(family: str, system: str, device: str) -> torch.nn.Module:
    """The model in training, under one system."""
    with torch.device(device):
        model = zoo.make(
            family,
            **dict(zip(NAMES, WIDTHS[family])),
            num_hidden_layers=LAYERS,
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
        )
    model = zoo.adapt(model.to(device, torch.bfloat16), r=16, lora_alpha=16).train()
    if system == "tunecompile":
        return tunecompile.optimize(model, executor="inductor" if device == "cuda" else "eager")
    if system == "compiled layers":
        for layer in (layer for stack in find_layers(model) for layer in stack.members):
            layer.compile(backend="inductor" if device == "cuda" else "eager")
    return model


class Training:
    """One system's model after its first two steps, and its row so far: milliseconds of each step after those, losses, peak."""

    def __init__(self, family: str, system: str, device: str):
        self.device, self.times, self.losses, self.peak = device, [], [], 0
        self.row: dict[str, Any] = {"family": family, "system": system}
        gc.collect()  # what others left
        others = self._allocated()
        self.model = build(family, system, device)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self.step()
        self.step()
        gc.collect()
        self.own = self._allocated() - others  # what stays between steps

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def step(self) -> None:
        inputs = zoo.batch(VOCABULARY, ROWS, LENGTH, self.device, seed=len(self.times))
        wait = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait()
        begin = time.perf_counter()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(**inputs, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        wait()
        self.times.append(1e3 * (time.perf_counter() - begin))
        self.losses.append(loss.item())

    def timed(self) -> None:
        before = self._allocated()
        self.step()
        if self.device == "cuda":
            self.peak = max(self.peak, self.own + torch.cuda.max_memory_allocated() - before)
            self.own += self._allocated() - before

    def done(self) -> dict[str, Any]:
        timed = self.times[2:] or self.times
        return {
            **self.row,
            "status": "ok",
            "step_ms": {"median": median(timed), "min": min(timed), "max": max(timed)},
            "first_step_s": self.times[0] / 1e3,
            "losses": self.losses,
            "peak_gib": self.peak / 2**30 or None,
        }


def rows(family: str, device: str, steps: int = STEPS) -> list[dict[str, Any]]:
    """One family under each system, a step of each at a time, so that all have the GPU at the same clocks. What fails is a row with its reason."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # of the family before
    running, failed = [], []
    for system in SYSTEMS:
        try:
            running.append(Training(family, system, device))
        except Exception as error:  # the others go on
            failed.append(
                {"family": family, "system": system, "status": "failed", "reason": f"{type(error).__name__}: {error}"}
            )
    for _ in range(steps):
        for training in running:
            training.timed()
    return [training.done() for training in running] + failed


def compile_all(families: list[str], device: str, processes: int) -> None:
    """Fill the caches of Inductor and Triton. What fails here fails again when it is measured."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as workers:
        running = {workers.submit(rows, family, device, 0): family for family in families}
        for number, done in enumerate(as_completed(running)):
            print(f"compiled {number + 1} of {len(running)}: {running[done]}", flush=True)


def alone(family: str, device: str, processes: int) -> list[dict[str, Any]]:
    """One family with the GPU to itself."""
    if not processes:
        return rows(family, device)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as worker:
        return worker.submit(rows, family, device).result()


def main() -> int:
    given = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if given.processes:
        compile_all(given.families, device, given.processes)
    runs: list[dict[str, Any]] = []
    for family in given.families:
        for row in alone(family, device, given.processes):
            runs.append(row)
            print(
                f"{family:12s}{row['system']:17s}"
                + (
                    f"{row['step_ms']['median']:8.1f} ms  {row['peak_gib'] or 0:6.2f} GiB"
                    if row["status"] == "ok"
                    else row["reason"][:200]
                ),
                flush=True,
            )
        given.out.write_text(
            json.dumps(
                {**header(), "device": device, "shape": f"{ROWS}x{LENGTH}", "layers": LAYERS, "runs": runs}, indent=1
            )
            + "\n"
        )
    return 0 if all(run["status"] == "ok" for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
