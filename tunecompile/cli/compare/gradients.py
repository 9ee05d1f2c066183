"""The check of a comparison: each system's process writes loss and gradients on one batch to a file.

`verification.tolerance` judges them. A new LoRA adapter has B = 0, so all gradients of A are zero: the check sets B to
small random values, runs one forward and backward, and restores the trained values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from tunecompile.cli.compare.loops import loss_of, to_device
from tunecompile.cli.compare.models import precision, set_initial_adapter, short_name
from tunecompile.cli.compare.spec import Job

B_SCALE = 0.01


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the trainable values in host memory."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_snapshot(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Copy the values of a snapshot into the model."""
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.copy_(values[name])


@contextlib.contextmanager
def check_state(model: nn.Module, seed: int, initial: dict[str, torch.Tensor] | None) -> Iterator[None]:
    """Set the trainable values of the check, equal in every process; restore the trained ones afterwards."""
    trained = snapshot(model)
    load_snapshot(model, initial or {})
    set_initial_adapter(model, seed, b_scale=B_SCALE)
    try:
        yield
    finally:
        load_snapshot(model, trained)


def families(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows of gradient errors by kind of parameter, which is its name without the number of the layer."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        parts = [p for p in row["parameter"].split(".") if not p.isdigit() and p not in ("model", "layers", "weight")]
        groups.setdefault(" ".join(parts), []).append(row)
    return groups


def dump_gradients(model: nn.Module, batch: dict, job: Job, path: str, initial: dict | None = None) -> None:
    """Run one forward and backward as in a plain loop, and write loss and gradients to a file.

    initial: the values before training, for full fine-tuning.
    """
    model.zero_grad(set_to_none=True)
    with check_state(model, job.seed, initial):
        with precision(job):
            loss = loss_of(model, to_device(batch, job.device), job)
        loss.backward()
    trainable = {short_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: None if p.grad is None else p.grad.detach().cpu() for name, p in trainable.items()}
    torch.save({"loss": float(loss.detach().double()), "gradients": gradients}, path)
    model.zero_grad(set_to_none=True)
