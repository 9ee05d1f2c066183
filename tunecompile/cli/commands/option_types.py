"""Types of options that several commands have, or that `compare` has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

MODEL, ROWS, TRAINING, JUDGING, MACHINES = "Model", "Rows", "Training", "Comparison", "Machines"  # panels of the help

# ---------------------------------------------------------------- of several commands

QloraFlag = Annotated[bool, typer.Option("--qlora", help="LoRA over an NF4 base (the default).", rich_help_panel=MODEL)]
FullFlag = Annotated[bool, typer.Option("--full", help="Train all weights.", rich_help_panel=MODEL)]
Systems = Annotated[
    str,
    typer.Option(
        help="Comma-separated: eager, compile, liger, unsloth, tunecompile, tunecompile-fp8, and -checkpoint variants. "
        "The table shows their versions. A system that is not installed is a row that says how to install it."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for report.html, report.md and report.json.")]

# ---------------------------------------------------------------- of `compare`

ModelOption = Annotated[
    Optional[str],
    typer.Option(help="A folder, a hub id, or a shape such as llama-3.1-8b (random weights).", rich_help_panel=MODEL),
]
ConfigOption = Annotated[
    Optional[Path],
    typer.Option(
        help="A YAML of TRL's commands or of axolotl: model, adapter, rows, batch, length and rate are taken from it. "
        "Options that are given go before it.",
        rich_help_panel=MODEL,
    ),
]
LoraFlag = Annotated[
    bool, typer.Option("--lora", help="LoRA over the base in its own precision.", rich_help_panel=MODEL)
]
CheckpointingFlag = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Recompute layers in the backward pass, in the systems that leave the choice.",
        rich_help_panel=MODEL,
    ),
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=MODEL)]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=MODEL)]
GpusOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of GPUs. torchrun starts a process for each, with --batch rows; device_map has one process.",
        rich_help_panel=MODEL,
    ),
]
ParallelOption = Annotated[
    str,
    typer.Option(
        help="How several GPUs are used: ddp, fsdp2, zero3 (DeepSpeed), device_map, or alone (separate trainings).",
        rich_help_panel=MODEL,
    ),
]
LayersOption = Annotated[
    Optional[int], typer.Option(min=1, help="Number of layers of a shape model.", rich_help_panel=MODEL)
]
DataOption = Annotated[
    Optional[Path],
    typer.Option(
        help="JSON Lines with messages, prompt and completion, or text; with --loss dpo: prompt, chosen and rejected.",
        rich_help_panel=ROWS,
    ),
]
BatchOption = Annotated[int, typer.Option(min=1, help="Rows (or pairs) a step.", rich_help_panel=ROWS)]
LengthOption = Annotated[int, typer.Option(min=2, help="Longest row, in tokens.", rich_help_panel=ROWS)]
BatchingOption = Annotated[
    str,
    typer.Option(
        help="padded: the rows of a batch are padded to one length. packed: the same rows form one row without "
        "padding; each keeps its own positions and attention.",
        rich_help_panel=ROWS,
    ),
]
PadToOption = Annotated[
    int, typer.Option(min=1, help="Pad lengths to a multiple of this, in every system.", rich_help_panel=ROWS)
]
TooLongOption = Annotated[str, typer.Option(help="If a row is longer: error or drop.", rich_help_panel=ROWS)]
ShapeOption = Annotated[
    str,
    typer.Option(help="BATCHxLENGTH[,...] of random tokens, for a shape model without --data.", rich_help_panel=ROWS),
]
HeldOutOption = Annotated[
    int, typer.Option(min=0, help="Rows that are not trained on, for the held-out loss.", rich_help_panel=ROWS)
]
StepsOption = Annotated[
    int, typer.Option(min=1, help="Optimizer steps; the first three are not timed.", rich_help_panel=TRAINING)
]
RateOption = Annotated[float, typer.Option(min=0, help="Learning rate, constant.", rich_help_panel=TRAINING)]
TrainerOption = Annotated[
    str,
    typer.Option(
        help="sft: TRL's SFTTrainer, or its DPOTrainer with --loss dpo. loop: a plain PyTorch loop.",
        rich_help_panel=TRAINING,
    ),
]
LossOption = Annotated[
    str,
    typer.Option(
        help="sft: cross-entropy of the answers. dpo: pairs of answers; the reference is the model without adapter.",
        rich_help_panel=TRAINING,
    ),
]
SeedOption = Annotated[
    int, typer.Option(help="For adapters, the order of rows, and dropout.", rich_help_panel=TRAINING)
]
SeedsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of seeds, from --seed on. Figures and curves then have a spread.",
        rich_help_panel=TRAINING,
    ),
]
TurnsOption = Annotated[
    Optional[bool],
    typer.Option(
        "--turns/--one-by-one",
        help="Alternate the systems step by step; the default on a CPU.",
        rich_help_panel=JUDGING,
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check/--no-check",
        help="Check losses and gradients against a high-precision reference.",
        rich_help_panel=JUDGING,
    ),
]
ReferenceStepsOption = Annotated[
    int, typer.Option(min=1, help="Steps of the reference's loss curve.", rich_help_panel=JUDGING)
]
AgainstOption = Annotated[
    Optional[Path],
    typer.Option(
        help="An older report.json: report what is slower, needs more memory or is less exact since then, and exit "
        "with 1 if anything is. Without --model the old comparison is repeated.",
        rich_help_panel=JUDGING,
    ),
]
