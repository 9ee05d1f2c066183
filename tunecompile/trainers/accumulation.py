"""`merge_accumulation`: batches that a Trainer accumulates come as one where they fit, by a prediction."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from tunecompile.errors import summary
from tunecompile.estimate.estimate import Estimate, estimate
from tunecompile.integrations.trainer_batches import calling_trainer, longest_row, merge_batches, why_kept
from tunecompile.notes import Note, note
from tunecompile.planner.device_memory import shown


def merge_accumulation(model: nn.Module) -> Note:
    """Have as many batches as fit come as one, in the Trainer that calls; what was done, or why nothing was.

    Args:
        model: the Trainer's, optimized.
    """
    trainer = calling_trainer()
    if trainer is None:
        return _kept(note("added-late"))
    if (why := why_kept(trainer)) is not None:
        return _kept(why)
    if (length := longest_row(trainer)) is None:
        return _kept(note("rows-unknown"))
    rows, steps = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    refused, most = None, None  # tokens that fit, where they are known
    for count in (count for count in range(steps, 1, -1) if steps % count == 0):
        if most is not None and count * rows * length > most:
            continue
        try:
            with _precision(trainer.args):
                told = estimate(model, (count * rows, length))
        except Exception as error:  # the run goes on as it is
            return _kept(summary(error))
        if told.fits is None or told.budget is None:
            return _kept(note("room-unknown"))
        if told.fits:
            merge_batches(trainer, count)
            return _merged(count, rows, length, told)
        batch = f"{count * rows} rows of {length} tokens"
        refused = refused or note("no-room", batch, peak=shown(told.peak), budget=shown(told.budget))
        most = told.fitting_tokens
    return _kept(refused or note("nothing-accumulated"))


def _kept(why: str) -> Note:
    return note("accumulation-kept", detail=why)


def _merged(count: int, rows: int, length: int, told: Estimate) -> Note:
    return note(
        "accumulation-merged",
        count=count,
        rows=rows,
        merged=count * rows,
        length=length,
        peak=shown(told.peak),
        budget=shown(told.budget or 0),
    )


def _precision(args: Any) -> contextlib.AbstractContextManager:
    """The Trainer's autocast."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    return contextlib.nullcontext() if dtype is None else torch.autocast(args.device.type, dtype)
