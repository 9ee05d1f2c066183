"""The result of verifying one step: losses, a row for each gradient, and verdicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tunecompile.notes import Note
from tunecompile.verification.tolerance import Verdict

SHOWN = 12  #: rows of a printed table


@dataclass(frozen=True)
class Verification:
    """One step, optimized, eager and in high precision. Printable; `to_dict()` for machines.

    A row of `gradients` has these keys:

    - `parameter`: its name.
    - `error`, `eager_error`: relative distances to the reference's gradient, ‖g - r‖ / max(‖r‖, floor), where the floor
      is the dtype's eps times the largest gradient.
    - `yardstick`: eager's error, or that of rounding where it is larger.
    - `norm_ratio`: ‖g‖ / ‖r‖.
    - `has_gradient`: whether there is one that is not zero, or eager has none either.
    """

    model: str  #: class of the model
    reference: str  #: dtype of the reference: "float32" or "float64"
    losses: dict[str, float]  #: of "optimized", "eager" and "reference"
    gradients: list[dict[str, Any]]  #: a row for each trained parameter
    verdicts: list[Verdict]  #: on the loss and on all gradients
    #: parameters that require a gradient and get none, in eager neither: perhaps a mistake
    untrained: list[str] = field(default_factory=list)
    #: each `rewrite` that makes a step wrong, with its `places`, and a sentence, `said`; it is switched off
    faults: list[dict[str, Any]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)  #: changes to the model while the step was verified

    @property
    def passed(self) -> bool:
        """Whether all verdicts hold."""
        return all(verdict.passed for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, ready for JSON, and `passed`."""
        return asdict(self) | {"passed": self.passed}

    def summary(self) -> str:
        """The verification in a line."""
        broken = "; ".join(
            f"{verdict.name} does not hold ({verdict.detail})" for verdict in self.verdicts if not verdict.passed
        )
        return (
            "; ".join([broken, *(fault["said"] for fault in self.faults)])
            if broken
            else f"{len(self.gradients)} gradients are as near to {self.reference} as eager's"
        )

    def __str__(self) -> str:
        lines = [
            f"tunecompile: one step of {self.model}, against {self.reference}: {'passed' if self.passed else 'FAILED'}",
            "  loss: " + ", ".join(f"{name} {loss:.7g}" for name, loss in self.losses.items()),
            *_table(self.gradients),
        ]
        lines += [f"  {'passed' if v.passed else 'FAILED'}: {v.name} ({v.detail})" for v in self.verdicts]
        lines += [f"  {fault['said']}" for fault in self.faults]
        if self.untrained:
            more = f" and {len(self.untrained) - 3} more" if len(self.untrained) > 3 else ""
            lines.append(f"  without a gradient, in eager too: {', '.join(self.untrained[:3])}{more}")
        return "\n".join([*lines, *(f"  note: {each}" for each in self.notes)])


def _table(rows: list[dict]) -> list[str]:
    """Rows as lines of a table, the worst parameters first."""
    worst = sorted(rows, key=lambda row: -row["error"] / row["yardstick"])[:SHOWN]
    width = max((len(row["parameter"]) for row in worst), default=0)
    lines = [f"  {'parameter':{width}}     error   eager's  of eager's  norm ratio"]
    for row in worst:
        ratio = f"{row['norm_ratio']:12.4f}" if row["has_gradient"] else " no gradient"
        errors = f"{row['error']:8.2e}  {row['eager_error']:8.2e}  {row['error'] / row['yardstick']:10.2f}"
        lines.append(f"  {row['parameter']:{width}}  {errors}{ratio}")
    return lines + (
        [f"  and {len(rows) - SHOWN} parameters that are nearer to the reference"] if len(rows) > SHOWN else []
    )
