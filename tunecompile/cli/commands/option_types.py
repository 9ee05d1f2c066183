"""Types of options that several commands have, or that `compare` has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from tunecompile.cli.compare.spec import Engine

# options in panels of the help
of_model, of_rows, of_training, of_judging, of_machines = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Rows", "Training", "Comparison", "Machines")
)

# ---------------------------------------------------------------- of several commands

QloraFlag = Annotated[bool, of_model("--qlora", help="LoRA over an NF4 base (the default).")]
FullFlag = Annotated[bool, of_model("--full", help="Train all weights.")]
Systems = Annotated[
    str,
    typer.Option(
        help="Comma-separated: eager, compile, liger, unsloth, tunecompile, tunecompile-fp8, tunecompile-int8, and "
        "-checkpoint variants. The table shows their versions. A system that is not installed is a row that says how "
        "to install it."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for report.html, report.md and report.json.")]

# ---------------------------------------------------------------- of `compare`

ModelOption = Annotated[
    Optional[str], of_model(help="A folder, a hub id, or a shape such as llama-3.1-8b (random weights).")
]
ConfigOption = Annotated[
    Optional[Path],
    of_model(
        help="A YAML of TRL's commands or of axolotl: model, adapter, rows, batch, length and rate are taken from it. "
        "Options that are given go before it."
    ),
]
LoraFlag = Annotated[bool, of_model("--lora", help="LoRA over the base in its own precision.")]
CheckpointingFlag = Annotated[
    bool,
    of_model(
        "--gradient-checkpointing", help="Recompute layers in the backward pass, in the systems that leave the choice."
    ),
]
DtypeOption = Annotated[Literal["auto", "float32", "bfloat16"], of_model(help="Of computation.")]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], of_model(help="auto: CUDA if there is a GPU.")]
GpusOption = Annotated[
    int,
    of_model(
        min=1, help="Number of GPUs. torchrun starts a process for each, with --batch rows; device_map has one process."
    ),
]
ParallelOption = Annotated[
    Engine, of_model(help="How several GPUs are used. zero3: DeepSpeed; alone: separate trainings.")
]
LayersOption = Annotated[Optional[int], of_model(min=1, help="Number of layers of a shape model.")]
DataOption = Annotated[
    Optional[Path],
    of_rows(
        help="JSON Lines with messages, prompt and completion, or text; with --loss dpo: prompt, chosen and rejected."
    ),
]
BatchOption = Annotated[int, of_rows(min=1, help="Rows (or pairs) a step.")]
LengthOption = Annotated[int, of_rows(min=2, help="Longest row, in tokens.")]
BatchingOption = Annotated[
    Literal["padded", "packed"],
    of_rows(
        help="padded: the rows of a batch are padded to one length. packed: the same rows form one row without "
        "padding; each keeps its own positions and attention."
    ),
]
PadToOption = Annotated[int, of_rows(min=1, help="Pad lengths to a multiple of this, in every system.")]
TooLongOption = Annotated[Literal["error", "drop"], of_rows(help="If a row is longer.")]
ShapeOption = Annotated[str, of_rows(help="BATCHxLENGTH[,...] of random tokens, for a shape model without --data.")]
HeldOutOption = Annotated[int, of_rows(min=0, help="Rows that are not trained on, for the held-out loss.")]
StepsOption = Annotated[int, of_training(min=1, help="Optimizer steps; the first three are not timed.")]
RateOption = Annotated[float, of_training(min=0, help="Learning rate, constant.")]
TrainerOption = Annotated[
    Literal["sft", "loop"],
    of_training(help="sft: TRL's SFTTrainer, or its DPOTrainer with --loss dpo. loop: a plain PyTorch loop."),
]
LossOption = Annotated[
    Literal["sft", "dpo"],
    of_training(
        help="sft: cross-entropy of the answers. dpo: pairs of answers; the reference is the model without adapter."
    ),
]
SeedOption = Annotated[int, of_training(help="For adapters, the order of rows, and dropout.")]
SeedsOption = Annotated[
    int, of_training(min=1, help="Number of seeds, from --seed on. Figures and curves then have a spread.")
]
TurnsOption = Annotated[
    Optional[bool], of_judging("--turns/--one-by-one", help="Alternate the systems step by step; the default on a CPU.")
]
CheckOption = Annotated[
    bool, of_judging("--check/--no-check", help="Check losses and gradients against a high-precision reference.")
]
ReferenceStepsOption = Annotated[int, of_judging(min=1, help="Steps of the reference's loss curve.")]
AgainstOption = Annotated[
    Optional[Path],
    of_judging(
        help="An older report.json: report what is slower, needs more memory or is less exact since then, and exit "
        "with 1 if anything is. Without --model the old comparison is repeated."
    ),
]
