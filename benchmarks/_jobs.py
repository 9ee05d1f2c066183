"""The job that a benchmark of training steps gives to `tunecompile.cli.compare`, and the options that name it."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from tunecompile.cli.compare.spec import Job
from tunecompile.estimate.known_shapes import SHAPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def add_loop_options(parser: argparse.ArgumentParser) -> None:
    """The options of `loop_job`: which known architecture, how it is trained, and how many of its layers."""
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--mode", choices=("qlora", "lora", "full"), default="qlora")
    parser.add_argument("--layers", type=int, help="so many layers only")


def loop_job(given: argparse.Namespace, **more: Any) -> Job:
    """Steps of a plain loop on a known architecture, in bf16 on a GPU.

    Args:
        given: with `model`, `mode` and `layers`.
        more: other fields of the job.
    """
    common = dict(system="hf", trainer="loop", lr=1e-4, device=DEVICE)
    common |= dict(dtype="bfloat16" if DEVICE == "cuda" else "float32")
    return Job(**common | dict(model=given.model, mode=given.mode, layers=given.layers) | more)
