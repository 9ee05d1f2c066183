"""Verdicts of a comparison: loss and gradients against the reference, speed and memory against eager."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunecompile.cli.compare.spec import REDUCED, REFERENCE, Job
from tunecompile.verification.tolerance import Verdict, compare_gradients, judge_gradients, judge_loss

STEP_LIMIT = 1.05  # a step may take this much of eager's time
EAGER = ("hf", "hf-checkpoint")  # the systems that others are compared with


@dataclass(frozen=True)
class Check:
    """Results of the comparison with the high-precision reference: gradient errors and verdicts."""

    gradients: list[dict] = field(default_factory=list)  #: of tunecompile
    reduced: list[dict] = field(default_factory=list)  #: of the first of `REDUCED`: shown, not judged
    verdicts: list[Verdict] = field(default_factory=list)


def first_ok(outcome: dict, *systems: str) -> tuple[str, dict] | None:
    """The name and the first run of the first of these systems whose run finished."""
    for name in systems:
        runs = outcome.get(name, {}).get("runs", [])
        if runs and runs[0].get("status") == "ok":
            return name, runs[0]
    return None


def judge(outcome: dict, reference: dict, scratch: str, job: Job) -> Check:
    """Judge loss and gradients of tunecompile by eager's error; the reference gives the error of both.

    Args:
        outcome: the workers' results by system.
        reference: the result of the reference's worker.
        scratch: the folder with the gradients that the workers saved.
        job: the template of the jobs.
    """
    eager, ours = first_ok(outcome, *EAGER), first_ok(outcome, "tunecompile")
    reduced, exact = first_ok(outcome, *REDUCED), first_ok({"reference": reference}, "reference")
    if eager is None or exact is None or not (ours or (reduced and "tunecompile" not in outcome)):
        lacking = [name for name, run in (("eager", eager), ("tunecompile", ours), ("the reference", exact)) if not run]
        detail = f"no finished run of {', '.join(lacking)}"
        return Check(verdicts=[Verdict("compared with eager and the reference", False, detail)])
    rows = gradient_errors(scratch, eager[0], ours[0], job) if ours else []
    losses = [judge_loss(exact[1]["losses"], eager[1]["losses"], ours[1]["losses"])] if ours else []
    return Check(
        rows,
        gradient_errors(scratch, eager[0], reduced[0], job) if reduced else [],
        [*losses, *judge_gradients(rows)] if ours else [],
    )


def gradient_errors(scratch: str, eager: str, system: str, job: Job) -> list[dict]:
    """Gradient errors of a system beside eager's, a row for each parameter."""
    import torch

    exact, usual, ours = (
        torch.load(f"{scratch}/{name}.pt", weights_only=True)["gradients"] for name in (REFERENCE, eager, system)
    )
    return compare_gradients(exact, usual, ours, getattr(torch, job.dtype))


def judge_speed(runs: list[dict]) -> list[Verdict]:
    """Judge time and memory of tunecompile by eager's, on the first shape. runs: one for all seeds."""
    fine = {run["system"]: run for run in runs if run["status"] == "ok" and run["shape"] == runs[0]["shape"]}
    eager, ours = fine.get("hf") or fine.get("hf-checkpoint"), fine.get("tunecompile")
    if not (eager and ours):
        return []
    before, after = eager["step_ms"]["median"], ours["step_ms"]["median"]
    detail = f"{after / before:.3f}: {after:.1f} ms against {before:.1f} ms"
    verdicts = [Verdict(f"a step takes at most {STEP_LIMIT} of eager's time", after <= STEP_LIMIT * before, detail)]
    if "saved_bytes" in eager and "saved_bytes" in ours:
        before, after = (run["saved_bytes"] / 2**20 for run in (eager, ours))
        detail = f"{after / before:.3f}: {after:.1f} MiB against {before:.1f} MiB"
        verdicts.append(Verdict("fewer bytes saved for backward than eager", after < before, detail))
    return verdicts


def judge_work(runs: list[dict]) -> list[Verdict]:
    """Judge whether all systems train as many values: training an adapter is faster than training the model."""
    trainable = {run["system"]: run["trainable"] for run in runs if run.get("trainable")}
    if len(trainable) < 2:
        return []
    detail = ", ".join(f"{system} {count:,}" for system, count in trainable.items())
    return [Verdict("every system trains as many values", len(set(trainable.values())) == 1, detail)]


def passed(result: dict) -> bool:
    """Whether every installed system ran, every verdict holds, and nothing got worse since an older result."""
    return (
        all(v["passed"] for v in result["verdicts"])
        and all(r["status"] in ("ok", "not installed") for r in result["runs"])
        and not any(row["worse"] for row in result.get("against", {}).get("rows", []))
    )
