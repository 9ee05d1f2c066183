"""The check step of a comparison: loss and gradients on one batch, written to a file by each system's process (`verify.py` judges them).

A fresh LoRA has B = 0 and so exact zeros for every gradient of A: the check sets B to small random values, takes one
forward and backward, and puts the trained values back.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from tunecompile.cli.compare.losses import loss_of
from tunecompile.cli.compare.models import precision, set_initial_adapter, short_name
from tunecompile.cli.compare.spec import Job

B_SCALE = 0.01


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trainable values, in host memory."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_snapshot(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.copy_(values[name])


@contextlib.contextmanager
def check_state(model: nn.Module, seed: int, initial: dict[str, torch.Tensor] | None):
    """The trainable values of the check, the same in every process; the trained ones come back afterwards."""
    trained = snapshot(model)
    load_snapshot(model, initial or {})
    set_initial_adapter(model, seed, b_scale=B_SCALE)
    try:
        yield
    finally:
        load_snapshot(model, trained)


def families(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows of gradient errors by kind of parameter: the same place in every layer."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        parts = [p for p in row["parameter"].split(".") if not p.isdigit() and p not in ("model", "layers", "weight")]
        groups.setdefault(" ".join(parts), []).append(row)
    return groups


def dump_gradients(model: nn.Module, batch: dict, job: Job, path: str, initial: dict | None = None) -> None:
    """One forward and backward, as in a plain loop; loss and gradients go to a file.

    `initial` holds the values before training where these are no adapter (full fine-tuning).
    """
    model.zero_grad(set_to_none=True)
    with check_state(model, job.seed, initial):
        with precision(job):
            loss = loss_of(model, batch, job)
        loss.backward()
    trainable = {short_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: None if p.grad is None else p.grad.detach().cpu() for name, p in trainable.items()}
    torch.save({"loss": float(loss.detach().double()), "gradients": gradients}, path)
    model.zero_grad(set_to_none=True)
