"""Runs of several seeds as one, distances between loss curves, and the noise of a batch."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from tunecompile.cli.compare.spec import system
from tunecompile.verification.tolerance import Verdict

BASES = ("hf", "hf-checkpoint", "tunecompile")  # the others are compared with the first of these that finished
#: figures of which several seeds give the median
MEDIANS = ("tokens_per_s", "peak_gib", "peak_reserved_gib", "saved_bytes", "first_step_s", "first_step_warm_s")
MEDIANS += ("launches_per_step", "host_ms_per_step", "held_out_before", "held_out_after")


def base_of(runs: list[dict]) -> dict | None:
    """The run that the other curves are compared with: of the first shape, in the model's own precision."""
    fine = [run for run in runs if run["status"] == "ok" and run["shape"] == runs[0]["shape"]]
    return next((run for name in BASES for run in fine if run["system"] == name), None)


def differences(run: dict, base: dict) -> list[float]:
    """The run's loss minus the base's, step by step."""
    return [ours - theirs for ours, theirs in zip(run["losses"], base["losses"])]


def compare_curves(runs: list[dict]) -> list[dict]:
    """The distance from the base's loss, a row for every other system of the same shape."""
    base = base_of(runs)
    rows = []
    for run in runs:
        if base is None or run is base or run["status"] != "ok" or run["shape"] != base["shape"]:
            continue
        apart = differences(run, base)
        rows.append(
            {
                "system": run["system"],
                "base": base["system"],
                "steps": len(apart),
                "mean": sum(apart) / len(apart),
                "mean_size": sum(map(abs, apart)) / len(apart),
                "largest": max(map(abs, apart)),
                "last": apart[-1],
            }
        )
    return rows


def batch_noise(losses: list[float]) -> float:
    """The standard deviation of a step's loss over batches; a difference of two steps contains two of them."""
    moves = [(after - before) ** 2 for before, after in pairwise(losses)]
    return (sum(moves) / max(len(moves), 1) / 2) ** 0.5


def judge_curves(runs: list[dict]) -> list[Verdict]:
    """Judge systems of a reduced precision by the noise of a batch, as eager's rounding is smaller than theirs."""
    base, rows = base_of(runs), compare_curves(runs)
    verdicts = []
    for row in rows:
        if base is None or system(row["system"]).precision is None:
            continue
        noise = batch_noise(base["losses"])
        others = [
            f"{other['system']}'s {other['mean_size']:.1e}"
            for other in rows
            if system(other["system"]).precision is None
        ]
        beside = f", {', '.join(others)}" if others else ""
        verdicts.append(
            Verdict(
                f"{row['system']}: loss differs from {row['base']}'s by less than from batch to batch",
                row["mean_size"] <= noise,
                f"mean distance {row['mean_size']:.1e} over {row['steps']} steps "
                f"(with sign {row['mean']:+.1e}){beside}; a batch's noise is {noise:.1e}",
            )
        )
    return verdicts


# ---------------------------------------------------------------- seeds


def merge_seeds(runs: list[dict]) -> list[dict]:
    """One run for each system and shape, in the order of the first run of each. A single run is not changed.

    In a merged run `losses` is the mean of each step, `band` the range of each step's loss, `spread` the range of each
    figure, and `seeds` the numbers of finished runs and of all runs. If no run finished, the first one represents them.
    """
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault((run["system"], run["shape"]), []).append(run)
    return [group[0] if len(group) == 1 else merge(group) for group in groups.values()]


def merge(group: list[dict]) -> dict:
    """One run for several that differ only in their seed."""
    fine = [run for run in group if run["status"] == "ok"]
    if not fine:
        return group[0] | {"seeds": [0, len(group)]}
    steps = list(zip(*(run["losses"] for run in fine)))
    found = {name: [run[name] for run in fine if run.get(name) is not None] for name in MEDIANS}
    medians = {name: median(values) for name, values in found.items() if values}
    times = [run["step_ms"] for run in fine]
    low, high = min(time["min"] for time in times), max(time["max"] for time in times)
    ranges = {**found, "last_loss": list(steps[-1])}
    return fine[0] | {
        **medians,
        "seeds": [len(fine), len(group)],
        "step_ms": {"median": median(time["median"] for time in times), "min": low, "max": high},
        "all_step_ms": [ms for run in fine for ms in timed(run)],
        "repeats": sum(len(timed(run)) for run in fine),
        "losses": [sum(step) / len(step) for step in steps],
        "band": [[min(step), max(step)] for step in steps],
        "spread": {name: [min(values), max(values)] for name, values in ranges.items() if len(values) > 1},
    }


def timed(run: dict) -> list[float]:
    """Milliseconds of the timed steps."""
    return run.get("all_step_ms", [])[-run.get("repeats", 0) :] if run.get("repeats") else []
