"""Distances of loss and gradients to a reference in high precision, judged by eager's own distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median, stdev

import torch
from torch import Tensor

LIMIT = 1.25  #: no parameter's error may exceed eager's by more than this
TIE = 1.05  #: distances within this factor are equal: both are mostly the rounding of the same weights
ERRORS = 2  #: standard errors by which a mean may be off by chance
ORDER = 16 * torch.finfo(torch.float32).eps  #: relative error of fp32 sums that depends on their order


@dataclass(frozen=True)
class Verdict:
    """One property that should hold, and whether it does."""

    name: str  #: what should hold
    passed: bool  #: whether it does
    detail: str  #: the figures


def relative_error(gradient: Tensor | None, reference: Tensor, floor: float) -> float:
    """‖g - r‖ / max(‖r‖, floor). A missing gradient counts as zero; a result that is no number is infinitely far."""
    reference = reference.double()
    gradient = torch.zeros_like(reference) if gradient is None else gradient.double()
    error = float((gradient - reference).norm() / max(float(reference.norm()), floor))
    return float("inf") if math.isnan(error) else error


def compare_gradients(
    reference: dict[str, Tensor | None],
    eager: dict[str, Tensor | None],
    system: dict[str, Tensor | None],
    dtype: torch.dtype,
) -> list[dict]:
    """Compare gradients, parameter by parameter.

    Args:
        reference: gradients in high precision, by parameter.
        eager: those of the eager model.
        system: those under test.
        dtype: that the model computes in.

    Returns:
        A row for every trainable parameter that has a gradient in the reference; `Verification` has its keys.
    """
    wanted = {name: g for name, g in reference.items() if g is not None}
    eps = torch.finfo(dtype).eps
    largest = max((float(g.double().norm()) for g in wanted.values()), default=0.0)
    floor = eps * largest or torch.finfo(torch.float64).tiny  # a batch may leave all gradients at zero
    rows = []
    for name, exact in wanted.items():
        gradient = system.get(name)
        eager_error = relative_error(eager.get(name), exact, floor)
        norm = 0.0 if gradient is None else float(gradient.double().norm())
        rows.append(
            {
                "parameter": name,
                "error": relative_error(gradient, exact, floor),
                "eager_error": eager_error,
                "yardstick": max(eager_error, eps, ORDER),
                "norm_ratio": norm / max(float(exact.double().norm()), floor),
                # or eager has none either, such as experts that no token reached
                "has_gradient": (gradient is not None and norm > 0) or not _is_any(eager.get(name)),
            }
        )
    return rows


def _is_any(gradient: Tensor | None) -> bool:
    """Whether there is a gradient that is not zero."""
    return gradient is not None and bool(gradient.any())


def judge_gradients(rows: list[dict]) -> list[Verdict]:
    """The three verdicts on gradients: the median, the worst, and that there is one for each parameter."""
    middle, eager_middle = (median(r[key] for r in rows) for key in ("error", "eager_error"))
    worst = max(rows, key=lambda r: r["error"] / r["yardstick"])
    ratio = worst["error"] / worst["yardstick"]
    missing = [r["parameter"] for r in rows if not r["has_gradient"]]
    return [
        Verdict(
            "median gradient error is at most eager's",
            middle <= max(eager_middle, ORDER),
            f"{middle:.3e} against {eager_middle:.3e} over {len(rows)} parameters",
        ),
        Verdict(
            f"no gradient error above {LIMIT} times eager's",
            ratio <= LIMIT,
            f"worst {ratio:.3f} at {worst['parameter']}",
        ),
        Verdict(
            "every trainable parameter got a gradient",
            not missing,
            f"{len(rows) - len(missing)} of {len(rows)}" + (f", none at {missing[0]}" if missing else ""),
        ),
    ]


def judge_loss(
    reference: list[float], eager: list[float], system: list[float], eps: float = torch.finfo(torch.float32).eps
) -> Verdict:
    """Judge losses over the reference's steps: as near to it as eager's, or farther by no more than the steps scatter.

    Where updates of bf16 weights are rounded, both curves wander about the reference's, and the mean distance over a
    few steps is partly chance. The scatter is the smaller of two: that of eager's own distances, which a loss that is
    wrong at one step exceeds, and that of the differences at each batch, which a loss that is wrong at every step
    exceeds.

    Args:
        reference: losses in high precision, one a step.
        eager: those of the eager model.
        system: those under test.
        eps: a relative distance that counts as none.

    Returns:
        The verdict.
    """
    steps = min(len(reference), len(eager), len(system))
    least = max(eps, torch.finfo(torch.float32).eps)  # losses are fp32 in every precision
    floor = least * max(map(abs, reference[:steps]))
    own, eagers = ([abs(a - b) for a, b in zip(losses[:steps], reference)] for losses in (system, eager))
    beyond = [a - b for a, b in zip(own, eagers)]
    # standard error of the difference of two means
    scatter = min(2**0.5 * stdev(eagers), stdev(beyond)) / steps**0.5 if steps > 1 else 0.0
    yardstick = max(mean(eagers), floor)
    return Verdict(
        "loss is as near to the reference as eager's",
        mean(own) <= TIE * yardstick + ERRORS * scatter,
        f"mean distance {mean(own):.2e} against eager's {yardstick:.2e} over {steps} steps"
        + (f", a standard error of {scatter:.1e}" if scatter else ""),
    )
