"""Are the gradients right? Every trainable parameter's, against a high-precision reference, with eager's own error beside it.

A fresh LoRA has B = 0 and so exact zeros for every gradient of A: the check sets B to small random values, takes one
forward and backward, and puts the trained values back.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import nn

from tunecompile.compare.meters import median
from tunecompile.compare.models import precision, set_initial_adapter, short_name
from tunecompile.compare.spec import Job

B_SCALE = 0.01
LOSS_LIMIT = 1.05  # both distances are mostly the rounding of the trained weights, which is alike: a tie is a pass
LIMIT = 1.25  # no parameter's error may exceed eager's by more than this


@dataclass(frozen=True)
class Verdict:
    """One line of the report: what was asked, whether it holds, and the figures."""

    name: str
    passed: bool
    detail: str


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


def dump_gradients(model: nn.Module, batch: dict, job: Job, path: str, initial: dict | None = None) -> None:
    """One forward and backward through `model(**batch).loss`; loss and gradients go to a file.

    `initial` holds the values before training where these are no adapter (full fine-tuning).
    """
    model.zero_grad(set_to_none=True)
    with check_state(model, job.seed, initial):
        with precision(job):
            loss = model(**batch).loss
        loss.backward()
    trainable = {short_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: None if p.grad is None else p.grad.detach().cpu() for name, p in trainable.items()}
    torch.save({"loss": float(loss.detach().double()), "gradients": gradients}, path)
    model.zero_grad(set_to_none=True)


def relative_error(gradient: torch.Tensor | None, reference: torch.Tensor, floor: float) -> float:
    """‖g - r‖ / max(‖r‖, floor). No gradient at all counts as zero, and something that is no number as infinite."""
    reference = reference.double()
    gradient = torch.zeros_like(reference) if gradient is None else gradient.double()
    error = float((gradient - reference).norm() / max(float(reference.norm()), floor))
    return error if error == error else float("inf")


def compare_gradients(reference: dict, eager: dict, system: dict, compute_dtype: str) -> list[dict]:
    """Rows of the results' `gradients`, one for every trainable parameter."""
    wanted = {name: g for name, g in reference["gradients"].items() if g is not None}
    eps = torch.finfo(getattr(torch, compute_dtype)).eps
    floor = eps * max(float(g.double().norm()) for g in wanted.values())
    rows = []
    for name, exact in wanted.items():
        gradient = system["gradients"].get(name)
        eager_error = relative_error(eager["gradients"].get(name), exact, floor)
        norm = 0.0 if gradient is None else float(gradient.double().norm())
        rows.append({
            "parameter": name,
            "error": relative_error(gradient, exact, floor),
            "eager_error": eager_error,
            "yardstick": max(eager_error, eps),
            "norm_ratio": norm / max(float(exact.double().norm()), floor),
            "has_gradient": gradient is not None and norm > 0,
        })
    return rows


def judge_gradients(rows: list[dict]) -> list[Verdict]:
    """The three promises about gradients."""
    middle, eager_middle = median([r["error"] for r in rows]), median([r["eager_error"] for r in rows])
    worst = max(rows, key=lambda r: r["error"] / r["yardstick"])
    ratio = worst["error"] / worst["yardstick"]
    missing = [r["parameter"] for r in rows if not r["has_gradient"]]
    return [
        Verdict("median gradient error is at most eager's", middle <= eager_middle,
                f"{middle:.3e} against {eager_middle:.3e} over {len(rows)} parameters"),
        Verdict(f"no gradient error above {LIMIT} times eager's", ratio <= LIMIT, f"worst {ratio:.3f} at {worst['parameter']}"),
        Verdict("every trainable parameter got a gradient", not missing,
                f"{len(rows) - len(missing)} of {len(rows)}" + (f", none at {missing[0]}" if missing else "")),
    ]


def judge_loss(reference: list[float], eager: list[float], system: list[float]) -> Verdict:
    """Over the steps that the reference took: is the system as near to it as eager is?"""
    steps = min(len(reference), len(eager), len(system))
    floor = torch.finfo(torch.float32).eps * max(map(abs, reference[:steps]))  # losses are fp32 in every precision
    own = sum(abs(a - b) for a, b in zip(system, reference)) / steps
    eagers = max(sum(abs(a - b) for a, b in zip(eager, reference)) / steps, floor)
    return Verdict("loss is as near to the reference as eager's", own <= LOSS_LIMIT * eagers,
                   f"mean distance {own:.2e} against eager's {eagers:.2e} over {steps} steps")
