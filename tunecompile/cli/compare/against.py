"""Compare a result with an older one: what is slower, needs more memory or is less exact by more than the spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tunecompile.cli.compare.curves import batch_noise
from tunecompile.cli.compare.data import digest
from tunecompile.cli.compare.gradients import families
from tunecompile.cli.compare.plots import quartile_distances
from tunecompile.cli.compare.seeds import merge_seeds
from tunecompile.cli.compare.spec import Job
from tunecompile.errors import NotComparable
from tunecompile.verification.tolerance import LIMIT, ORDER, TIE

SLACK = 0.02  # relative changes by clocks, allocators and other processes from one day to the next
PATHS = ("adapter", "gradients")  # settings that say where to save
SAME, APART = "same", "not comparable"
OPTIONS = (  # other values make another measurement
    "mode",
    "trainer",
    "loss",
    "steps",
    "batch",
    "seq_len",
    "batching",
    "pad_to",
    "too_long",
    "lr",
    "seed",
    "dtype",
    "checkpointing",
    "layers",
    "rank",
    "alpha",
    "held_out",
    "gpus",
    "parallel",
)
CHECKS = (("tunecompile", "gradients"), ("tunecompile-fp8", "reduced_gradients"))  # fields with a system's gradients

Extent = tuple[float, float, float]  # a figure, and the lowest and highest value of its spread


@dataclass(frozen=True)
class Figure:
    """One figure of a run, and the words for its changes."""

    name: str
    read: Callable[[dict], Extent | None]
    worse: str
    better: str
    more_is_better: bool = False
    form: str = ",.2f"


# ---------------------------------------------------------------- before anything runs


def check_like(path: str | Path, old: dict, job: Job, model: str, machine: dict) -> None:
    """Check that the job has the model, the data, the options and the device of the old result.

    Raises:
        NotComparable: it differs; the message names every difference.
    """
    settings, runs = old["settings"], old["runs"]
    pairs = [
        ("model", runs[0]["model"], model),
        ("device", settings.get("device"), job.device),
        ("machine", device_of(old["machine"], job.device), device_of(machine, job.device)),
    ]
    defaults = {field.name: field.default for field in dataclasses.fields(Job)}
    pairs += [(name, settings.get(name, defaults[name]), getattr(job, name)) for name in OPTIONS]
    pairs.append(("data", Path(settings.get("data") or "").name, Path(job.data or "").name))
    if job.data and "data_sha256" in settings:
        pairs.append(("rows of the data", settings["data_sha256"][:12], digest(job.data)[:12]))
    apart = [f"{name} was {before!r} and is {now!r}" for name, before, now in pairs if before != now]
    if apart:
        raise NotComparable(path=path, differences="; ".join(apart))


def device_of(machine: dict, device: str) -> str:
    """The name of the GPU or CPU that was used."""
    return machine["gpu"] if device == "cuda" else machine["cpu"]


def repeated(old: dict) -> tuple[Job, dict]:
    """The job of an old result, and the other arguments of its `Comparison`."""
    settings = old["settings"]
    known = {field.name for field in dataclasses.fields(Job)}
    job = Job(**{name: value for name, value in settings.items() if name in known and name not in PATHS})
    more = {
        "name": old["runs"][0]["model"],
        "turns": settings.get("turns", False),
        "seeds": settings.get("seeds", 1),
        "check": bool(old["gradients"] or old.get("reduced_gradients")),
    }
    if "reference" in old:
        more["reference_steps"] = len(old["reference"]["losses"])
    return job, more


# ---------------------------------------------------------------- afterwards


def compare_results(old: dict, new: dict) -> list[dict]:
    """A row for every figure of every system and shape: `verdict` names the change, `worse` whether it is bad."""
    before, now = ({(run["system"], run["shape"]): run for run in merge_seeds(result["runs"])} for result in (old, new))
    rows = [row for key in dict.fromkeys([*before, *now]) for row in compare_runs(*key, before.get(key), now.get(key))]
    for system, field in CHECKS:
        if old.get(field) or new.get(field):
            rows += compare_errors(system, old.get(field) or [], new.get(field) or [])
    return rows


def compare_runs(system: str, shape: str, old: dict | None, new: dict | None) -> list[dict]:
    """A row for every figure of one system and shape; one row in all if a run is missing or failed."""
    common = {"system": system, "shape": shape}
    if old is None or new is None or old["status"] != "ok" or new["status"] != "ok":
        broken = old is not None and old["status"] == "ok" and new is not None and new["status"] != "not installed"
        statuses = {"before": old["status"] if old else "not run", "now": new["status"] if new else "not run"}
        return [common | statuses | {"figure": "whole run", "verdict": "fails" if broken else APART, "worse": broken}]
    rows = []
    for figure in FIGURES:
        before, now = figure.read(old), figure.read(new)
        if before is not None and now is not None:
            rows.append(common | judged(figure, before, now, SLACK))
        elif before or now:
            rows.append(common | apart(figure, before, now))
    return rows


def compare_errors(system: str, old: list[dict], new: list[dict]) -> list[dict]:
    """Gradient errors over all parameters, and of families whose errors changed.

    A family has fewer parameters, so its errors vary more by chance, and its limit is wider.
    """
    groups = [{"all parameters": rows} | families(rows) if rows else {} for rows in (old, new)]
    rows = []
    for name in dict.fromkeys([*groups[0], *groups[1]]):
        figure = dataclasses.replace(ERROR, name=f"gradient error, {name}")
        before, now = (
            point(median([row["error"] for row in group[name]])) if name in group else None for group in groups
        )
        if before is None or now is None:
            found = apart(figure, before, now)
        else:
            whole = name == "all parameters"
            found = judged(figure, before, now, (TIE if whole else LIMIT) - 1, least=ORDER)
            if found["verdict"] == SAME and not whole:
                continue
        rows.append({"system": system, "shape": ""} | found)
    return rows


def judged(figure: Figure, old: Extent, new: Extent, slack: float, least: float = 0.0) -> dict:
    """Judge a figure: it has changed if the spreads do not overlap, and the values differ by more than the slack.

    Values below `least` are rounding, and count as equal.
    """
    sign = -1 if figure.more_is_better else 1
    distance = max(new[0], least) - max(old[0], least)
    beyond = abs(distance) > slack * abs(max(old[0], least)) and (new[1] > old[2] or new[2] < old[1])
    worse = beyond and sign * distance > 0
    return {
        "figure": figure.name,
        "before": shown(figure, old),
        "now": shown(figure, new),
        "change": new[0] / old[0] - 1 if old[0] else 0.0,
        "verdict": (figure.worse if worse else figure.better) if beyond else SAME,
        "worse": worse,
    }


def apart(figure: Figure, old: Extent | None, new: Extent | None) -> dict:
    """The row of a figure that only one of the results has."""
    return {
        "figure": figure.name,
        "before": format(old[0], figure.form) if old else "not measured",
        "now": format(new[0], figure.form) if new else "not measured",
        "verdict": APART,
        "worse": False,
    }


def shown(figure: Figure, extent: Extent) -> str:
    """The value, with its spread if it has one."""
    value, low, high = (format(number, figure.form) for number in extent)
    return value if low == high else f"{value} ({low} to {high})"


# ---------------------------------------------------------------- figures and their spread


def point(value: float) -> Extent:
    """A value without a spread."""
    return value, value, value


def speed(run: dict) -> Extent:
    """Tokens/s; its spread is the range over seeds, or the quartiles of the steps of a single seed."""
    value, middle = run["tokens_per_s"], run["step_ms"]["median"]
    if given := run.get("spread", {}).get("tokens_per_s"):
        return value, *given
    faster, slower = quartile_distances(run)
    return value, value * middle / (middle + slower), value * middle / (middle - faster)


def plain(key: str, scale: float = 1) -> Callable[[dict], Extent | None]:
    """Reads a figure by its key, divided by the scale; its spread is the range over seeds."""

    def read(run: dict) -> Extent | None:
        if run.get(key) is None:
            return None
        low, high = run.get("spread", {}).get(key) or (run[key], run[key])
        return run[key] / scale, low / scale, high / scale

    return read


def loss(key: str, read: Callable[[dict], float | None]) -> Callable[[dict], Extent | None]:
    """Reads a loss; its spread is the range over seeds, or the noise of a batch for a single seed."""

    def extent(run: dict) -> Extent | None:
        value = read(run)
        if value is None:
            return None
        noise = batch_noise(run["losses"])
        return value, *run.get("spread", {}).get(key, (value - noise, value + noise))

    return extent


FIGURES = (
    Figure("tokens/s", speed, "slower", "faster", more_is_better=True, form=",.0f"),
    Figure("peak memory, GiB", plain("peak_gib"), "more memory", "less memory"),
    Figure("saved for backward, MiB", plain("saved_bytes", 2**20), "more memory", "less memory", form=",.1f"),
    Figure("last loss", loss("last_loss", lambda run: run["losses"][-1]), "less exact", "more exact", form=".4f"),
    Figure(
        "held-out loss",
        loss("held_out_after", lambda run: run.get("held_out_after")),
        "less exact",
        "more exact",
        form=".4f",
    ),
)
ERROR = Figure("gradient error", lambda row: point(row["error"]), "less exact", "more exact", form=".2e")
