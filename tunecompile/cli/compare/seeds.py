"""Merge runs that differ only in their seed: the median of each figure, and its range."""

from __future__ import annotations

from statistics import median

MEDIANS = (
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
    found = {name: [run[name] for run in fine if run.get(name) is not None] for name in MEDIANS} | {
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
    """Milliseconds of the timed steps."""
    return run.get("all_step_ms", [])[-run.get("repeats", 0) :] if run.get("repeats") else []
