"""What to compare, and the checks of it that need no training."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunecompile.cli.compare import data, models
from tunecompile.cli.compare.meters import WARMUP
from tunecompile.cli.compare.processes import Listener
from tunecompile.cli.compare.spec import Job, System
from tunecompile.errors import BadOption, DataMissing, ShapeWithData, need
from tunecompile.estimate.known_shapes import SHAPES


def ignore(*_: Any) -> None:
    """Listen to nothing."""


@dataclass(frozen=True)
class Comparison:
    """What to compare. `job` is the template; the jobs of the systems differ in the system's name only."""

    systems: list[System]
    job: Job
    out: Path
    name: str = ""  #: the model's name in the results; "": the name of its folder
    reference_steps: int = 10
    seeds: int = 1  #: number of repetitions; checks and answers are those of the first
    check: bool = True
    turns: bool = False
    warm: bool = False  #: measure the first step of compiling systems once more, in a new process with filled caches
    #: called with the result so far after each timed run and before the check; its `incomplete` says what is to come
    keep: Callable[[dict], None] = ignore
    deadline: float | None = None  #: of time.monotonic: what runs then is ended, and what would follow is left out
    listen: Listener = ignore

    @property
    def ahead(self) -> bool:
        """Whether processes import their packages at the same time, before they use the GPU one after the other."""
        return self.job.device == "cuda" and self.job.gpus == 1 and not self.turns

    @property
    def model_name(self) -> str:
        """The model's name in the results."""
        return self.name or Path(self.job.model).name


def check_request(comparison: Comparison) -> None:
    """Raise a `UsageError` or `MissingExtra` for every mistake that can be found without training."""
    job = comparison.job
    for option, value, reason in mistakes(job):
        raise BadOption(option=option, value=value, reason=reason)
    need("the comparison", "hf", "transformers", "accelerate")
    if job.mode != "full":
        need(f"--{job.mode}", "hf", "peft")
    if job.mode == "qlora":
        need("--qlora", "qlora", "bitsandbytes")
    models.check_model(job.model)
    if not job.shapes:
        check_data(job)


def check_data(job: Job) -> None:
    """Check that the model can train on the data."""
    if models.is_shape(job.model):
        raise ShapeWithData(model=job.model)
    if job.trainer == "sft":
        need("--trainer sft", "trl", "trl", "datasets")
    if job.data is None:
        raise DataMissing(shapes=", ".join(SHAPES))
    rows = data.read_rows(job.data, job.loss)
    if Path(job.model).exists():  # the first worker fetches the tokenizer of a hub model
        data.split_rows(rows, models.load_tokenizer(job), job)


def mistakes(job: Job) -> Iterator[tuple[str, Any, str]]:
    """Options that no training can have: option, value, and what to give instead."""
    import torch

    if job.steps <= WARMUP:
        yield "--steps", job.steps, f"the first {WARMUP} steps are not timed, so take at least {WARMUP + 1}"
    if job.loss == "dpo" and job.mode == "full":
        yield "--loss", job.loss, "its reference is the model without its adapter, so use --lora or --qlora"
    if job.loss == "dpo" and job.batching == "packed":
        yield "--loss", job.loss, "its pairs are padded, so omit --batching"
    if job.loss == "dpo" and job.shapes:
        needed = "it needs rows with prompt, chosen and rejected: give --data, and a model with a tokenizer"
        yield "--loss", job.loss, needed
    there = torch.cuda.device_count() if job.device == "cuda" else os.cpu_count() or 1
    if job.gpus > there:
        yield "--gpus", job.gpus, f"this machine has {there}" + " cores" * (job.device != "cuda")
    if job.gpus == 1:
        return
    if job.trainer == "sft" and job.parallel not in ("ddp", "device_map"):
        yield "--parallel", job.parallel, "trainers take their engine from accelerate's config, so use --trainer loop"
    if job.parallel == "zero3" and importlib.util.find_spec("deepspeed") is None:
        yield "--parallel", job.parallel, "DeepSpeed is not installed: pip install deepspeed"
    if job.parallel == "zero3" and len(job.shapes) > 1:
        yield "--shape", ",".join(job.shapes), "DeepSpeed takes a model once, so give one shape"
