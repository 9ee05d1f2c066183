"""Whole runs, from the start of the process to the saved adapter: SFTTrainer with TRL's defaults; one JSON in the common shape.

    python benchmarks/steps/run.py --model llama-3.1-8b --systems tunecompile,tunecompile-warm,unsloth,hf \\
        --seconds 560 --out benchmarks/results/run-llama-3.1-8b-qlora.json

Rows have log-normal lengths, and all systems are given the same. Each system has a process of its own that imports what a user's
script would, and empty caches; `tunecompile-warm` is given those that `tunecompile` filled. A name that ends in `-no-checkpoint`
(`tunecompile-no-checkpoint`, `-no-checkpoint-warm`) is without gradient checkpointing, which is TRL's default; with
`--checkpointing off` all are. Unsloth has its own checkpointing. Random weights are saved before; to load them is part of a run.
A row is written when its process ends; one that was cut is `incomplete`, and has the steps until then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs without an installation, too

from benchmarks._results import ENVIRONMENT, INCOMPLETE, row_apart, run_apart
from benchmarks._rows import draw_lengths, draw_tokens

#: model -> (how it is trained, how many of its layers, where not all)
MODELS: dict[str, tuple[str, int | None]] = {
    "llama-3.1-8b": ("qlora", None),
    "llama-3.2-1b": ("qlora", None),
    "gemma-4-e4b": ("qlora", None),
    "qwen3.5-9b": ("lora", 8),
    "gpt-oss-20b": ("lora", 6),
    "qwen3-30b-a3b": ("lora", 8),
    "llama-tiny": ("lora", 2),
    "mixture-tiny": ("lora", 2),  # both for trials
}
SPREAD = 8  #: times the median that a row is long at most
WARM, OFF = "-warm", "-no-checkpoint"  #: what names of systems end with
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
READING = 90  #: seconds that packages may take to be read
#: what a script imports, by engine: read from the disk once before, so that the first process is not slower than others
IMPORTS = {
    "hf": "import datasets, peft, transformers; from trl import SFTTrainer; from transformers import AutoModelForCausalLM",
    "unsloth": "import unsloth; from trl import SFTTrainer",
    "tunecompile": "import tunecompile",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--mode", choices=("qlora", "lora"), help="the model's usual one, if not given")
    parser.add_argument("--layers", type=int, help="the model's usual number, if not given")
    parser.add_argument("--systems", default="tunecompile,tunecompile-warm,unsloth,hf")
    parser.add_argument("--checkpointing", choices=("on", "off"), default="on")
    parser.add_argument("--shape", default="2x~200", help="rows and median length, or without ~ the length of all")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of it may take")
    parser.add_argument("--logs", type=Path, help="folder for the processes' output")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def parse_system(name: str) -> dict[str, Any]:
    """Engine, caches and checkpointing of a name. `caches_of`: the name whose caches it has."""
    base = name.removesuffix(WARM)
    return {
        "engine": base.removesuffix(OFF),
        "caches": "warm" if base != name else "cold",
        "caches_of": base,
        "checkpointing": not base.endswith(OFF),
    }


def checked_systems(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is known of each system. Ends the process where a name is unknown, or where nothing fills the caches of one."""
    systems = {name: parse_system(name) for name in names}
    for place, (name, about) in enumerate(systems.items()):
        if about["engine"] not in IMPORTS:
            sys.exit(f"there is no system {name}: {', '.join(IMPORTS)}, with {OFF} and {WARM} behind them")
        if about["caches"] == "warm" and about["caches_of"] not in names[:place]:
            sys.exit(f"{name} is to follow {about['caches_of']}, which fills its caches")
    return systems


def draw_rows(given: argparse.Namespace, vocabulary: int) -> tuple[list[list[int]], int]:
    """The rows of a run, and the length that none exceeds."""
    batch, _, length = given.shape.partition("x")
    count, typical = int(batch) * given.accumulation * given.steps, int(length.removeprefix("~"))
    longest = SPREAD * typical if length.startswith("~") else typical
    random.seed(given.seed)
    lengths = draw_lengths(count, typical, longest) if length.startswith("~") else [typical] * count
    return [draw_tokens(each, vocabulary) for each in lengths], longest


class Runs:
    """The processes of all systems, on one folder of weights."""

    def __init__(self, given: argparse.Namespace, scratch: Path):
        from tunecompile.cli.compare.models import unsloth_targets
        from tunecompile.cli.compare.spec import Job
        from tunecompile.estimate.known_shapes import empty_model, is_mixture, lora_targets, shape_config

        self.given, self.scratch = given, scratch
        mode, layers = MODELS[given.model]
        self.mode, self.layers = given.mode or mode, given.layers or layers
        self.systems = checked_systems(given.systems.split(","))
        config = shape_config(given.model, self.layers)
        empty = empty_model(config)
        job = Job(system="unsloth", model=given.model)
        self.targets = {"unsloth": {"target_modules": unsloth_targets(empty, job)}}
        self.targets |= {engine: lora_targets(empty) for engine in IMPORTS if engine != "unsloth"}
        self.mixture = is_mixture(config)
        rows, self.longest = draw_rows(given, config.vocab_size)
        (scratch / "rows.json").write_text(json.dumps(rows))

    def cases(self) -> dict[str, dict[str, Any]]:
        """By the systems' names, what is known of a row before it runs."""
        given = self.given
        common: dict[str, Any] = {"model": given.model, "mode": self.mode, "trainer": "sft", "shape": given.shape}
        common |= {"layers": self.layers} if self.layers else {}
        common |= {"experts": True} if self.mixture else {}
        common |= {"accumulation": given.accumulation, "steps": given.steps, "seed": given.seed, "budget_gib": None}
        found = {}
        for name, about in self.systems.items():
            on = about["checkpointing"] and given.checkpointing == "on"
            system = {"system": name.removesuffix(WARM), "caches": about["caches"], "checkpointing": on}
            found[name] = common | system
        return found

    def save(self, folder: str, device: str) -> None:
        """Save the weights; meanwhile other processes read the packages from the disk."""
        from tunecompile.cli.compare.shapes import save_shape_model

        engines = dict.fromkeys(about["engine"] for about in self.systems.values())
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", IMPORTS[engine]],
                **self.surroundings("readers"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for engine in engines
            if device == "cuda"
        ]
        save_shape_model(
            *(self.given.model, folder),
            seed=self.given.seed,
            device=device,
            layers=self.layers,
            quantise=self.mode == "qlora",
        )
        for reader in readers:
            try:
                reader.wait(READING)
            except subprocess.TimeoutExpired:
                reader.kill()

    def surroundings(self, name: str) -> dict[str, Any]:
        """Environment and folder of a process, with caches of this name."""
        own = self.scratch / name
        (own / "cwd").mkdir(parents=True, exist_ok=True)  # where Unsloth writes its code
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        caches = {variable: str(own / cache) for variable, cache in CACHES.items()}
        return {
            "env": os.environ | caches | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))},
            "cwd": str(own / "cwd"),
        }

    def run(self, name: str, folder: str, seconds: float) -> dict[str, Any]:
        """The row of one system, from a process of its own."""
        given, about = self.given, self.systems[name]
        spec = {"folder": folder, "rows": str(self.scratch / "rows.json"), "longest": self.longest}
        spec |= {"engine": about["engine"], "mode": self.mode, "targets": self.targets[about["engine"]]}
        spec |= {"checkpointing": self.cases()[name]["checkpointing"], "seed": given.seed, "steps": given.steps}
        spec |= {"batch": int(given.shape.partition("x")[0]), "accumulation": given.accumulation}
        path = self.scratch / f"{name}.json"
        path.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "benchmarks._run_script", str(path), str(time.time())]
        log = given.logs / f"run-{name}.log"
        row = row_apart(command, log, seconds, **self.surroundings(about["caches_of"]))
        if row["status"] == INCOMPLETE:
            row["left_out"] = f"steps {len(row['steps_s']) + 1} to {given.steps}"
        return row


def tell(row: dict[str, Any]) -> str:
    """A row in a line."""
    return (
        f"{row['wall_s']:.1f} s (first step {row['wall_first_s']:.1f}), then {row['step_ms']['median']:.0f} ms a step, "
        f"{len(row['slow_steps'])} slow, {row['peak_gib']:.1f} GiB"
    )


def main() -> int:
    given = parse_arguments()
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="tunecompile-runs-") as scratch:
        runs = Runs(given, Path(scratch))
        return run_apart(given, runs.cases(), runs.save, runs.run, tell)


if __name__ == "__main__":
    raise SystemExit(main())
