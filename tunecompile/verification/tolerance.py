"""How near a step's loss and gradients are to a reference in high precision, with eager's own distance as the yardstick."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median, stdev

import torch
from torch import Tensor

__all__ = ["LIMIT", "Verdict"]

LIMIT = 1.25  #: no parameter's error may exceed eager's by more than this
TIE = 1.05  #: losses this near each other are alike: both distances are mostly the rounding of the same weights
ERRORS = 2  #: standard errors of a mean that luck may make
ORDER = 16 * torch.finfo(torch.float32).eps  #: relative error that fp32 sums have by the order they are taken in


@dataclass(frozen=True)
class Verdict:
    """One question, and the answer."""

    name: str  #: what should hold
    passed: bool  #: whether it does
    detail: str  #: the figures


def relative_error(gradient: Tensor | None, reference: Tensor, floor: float) -> float:
    """‖g - r‖ / max(‖r‖, floor). No gradient at all counts as zero, and something that is no number as infinite."""
    reference = reference.double()
    gradient = torch.zeros_like(reference) if gradient is None else gradient.double()
    error = float((gradient - reference).norm() / max(float(reference.norm()), floor))
    return error if error == error else float("inf")


def compare_gradients(
    reference: dict[str, Tensor | None],
    eager: dict[str, Tensor | None],
    system: dict[str, Tensor | None],
    dtype: torch.dtype,
) -> list[dict]:
    """A row for every trainable parameter that has a gradient in the reference. dtype: what is computed in."""
    wanted = {name: g for name, g in reference.items() if g is not None}
    eps = torch.finfo(dtype).eps
    floor = (
        eps * max((float(g.double().norm()) for g in wanted.values()), default=0.0) or torch.finfo(torch.float64).tiny
    )  # a batch may mean nothing to what is trained
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
                "has_gradient": (gradient is not None and norm > 0)
                or not _is_any(eager.get(name)),  # of experts that no token reached, say
            }
        )
    return rows


def _is_any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def judge_gradients(rows: list[dict]) -> list[Verdict]:
    """The three promises about gradients."""
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
    """Over the steps that the reference took: is the system as near to it as eager is, or farther by no more than its steps scatter? eps: a relative distance
    that is none.

    Where updates of bf16 weights are rounded, both curves wander about the reference's, and a few steps' mean distance is partly luck. How much, eager's own
    distances say, and those by which the system is farther at each batch: a loss that is wrong at one step exceeds the first, one that is wrong at every step
    the second.
    """
    steps = min(len(reference), len(eager), len(system))
    floor = max(eps, torch.finfo(torch.float32).eps) * max(
        map(abs, reference[:steps])
    )  # losses are fp32 in every precision
    own, eagers = ([abs(a - b) for a, b in zip(losses[:steps], reference)] for losses in (system, eager))
    beyond = [a - b for a, b in zip(own, eagers)]
    scatter = (
        min(2**0.5 * stdev(eagers), stdev(beyond)) / steps**0.5 if steps > 1 else 0.0
    )  # of the difference of two means
    yardstick = max(mean(eagers), floor)
    return Verdict(
        "loss is as near to the reference as eager's",
        mean(own) <= TIE * yardstick + ERRORS * scatter,
        f"mean distance {mean(own):.2e} against eager's {yardstick:.2e} over {steps} steps"
        + (f", a standard error of {scatter:.1e}" if scatter else ""),
    )
