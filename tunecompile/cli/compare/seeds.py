"""Runs that differ in their seed alone, laid together: the middle of each figure, and from where to where it went."""

from __future__ import annotations

from tunecompile.cli.compare.meters import median

MIDDLE = (
    "tokens_per_s",
    "peak_gib",
    "peak_reserved_gib",
    "saved_bytes",
    "first_step_s",
    "first_step_warm_s",
    "launches_per_step",
    "host_ms_per_step",
    "held_out_before",
    "held_out_after",
)


def merge_seeds(runs: list[dict]) -> list[dict]:
    """One run for each system and shape, in the order of the first of each. A single one stays as it is.

    `losses` is the mean of each step, `band` from where to where each step's loss went, and `spread` the same for the figures that several seeds
    have; `seeds` counts the runs that are ok and all. Where none is ok the first one stands for them.
    """
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        groups.setdefault((run["system"], run["shape"]), []).append(run)
    return [group[0] if len(group) == 1 else merge(group) for group in groups.values()]


def merge(group: list[dict]) -> dict:
    fine = [run for run in group if run["status"] == "ok"]
    if not fine:
        return group[0] | {"seeds": [0, len(group)]}
    steps = list(zip(*(run["losses"] for run in fine)))
    found = {name: [run[name] for run in fine if run.get(name) is not None] for name in MIDDLE} | {
        "last_loss": list(steps[-1])
    }
    times = [run["step_ms"] for run in fine]
    merged = fine[0] | {name: median(values) for name, values in found.items() if values and name != "last_loss"}
    merged |= {
        "seeds": [len(fine), len(group)],
        "step_ms": {
            "median": median([t["median"] for t in times]),
            "min": min(t["min"] for t in times),
            "max": max(t["max"] for t in times),
        },
        "all_step_ms": [ms for run in fine for ms in timed(run)],
        "repeats": sum(len(timed(run)) for run in fine),
        "losses": [sum(step) / len(step) for step in steps],
        "band": [[min(step), max(step)] for step in steps],
        "spread": {name: [min(values), max(values)] for name, values in found.items() if len(values) > 1},
    }
    return merged


def timed(run: dict) -> list[float]:
    """Milliseconds of the steps that count."""
    return run.get("all_step_ms", [])[-run.get("repeats", 0) :] if run.get("repeats") else []
