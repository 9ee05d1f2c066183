"""The job that a benchmark of training steps gives to `tunecompile.cli.compare`."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from tunecompile.cli.compare.spec import Job

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def loop_job(given: argparse.Namespace, **more: Any) -> Job:
    """Steps of a plain loop on a known architecture, in bf16 on a GPU.

    Args:
        given: with `model`, `mode` and `layers`.
        more: other fields of the job.
    """
    common = dict(system="hf", trainer="loop", lr=1e-4, device=DEVICE)
    common |= dict(dtype="bfloat16" if DEVICE == "cuda" else "float32")
    return Job(**common | dict(model=given.model, mode=given.mode, layers=given.layers) | more)
