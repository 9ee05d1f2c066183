"""Compare a result with an older one: what is slower, needs more memory or is less exact by more than the spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tunecompile.cli.compare.curves import batch_noise, merge_seeds
from tunecompile.cli.compare.data import digest
from tunecompile.cli.compare.gradients import families
from tunecompile.cli.compare.plots import quartile_distances
from tunecompile.cli.compare.spec import Job
from tunecompile.errors import NotComparable
from tunecompile.verification.tolerance import LIMIT, ORDER, TIE

SLACK = 0.02  # relative changes by clocks, allocators and other processes from one day to the next
PATHS = ("adapter", "gradients")  # settings that say where to save
SAME, APART = "same", "not comparable"
#: fields of a job in which two results may differ, or which are compared otherwise: rows of tables have their shapes
FREE = {*PATHS, "system", "model", "data", "shapes", "device", "repeat"}
FREE |= {"questions", "saved_bytes", "launches", "trust_cache"}
CHECKS = (
    ("tunecompile", "gradients"),
    ("tunecompile in 8 bits", "reduced_gradients"),
)  # fields with a system's gradients

Extent = tuple[float, float, float]  # a figure, and the lowest and highest value of its spread
Reader = Callable[[dict], "Extent | None"]


@dataclass(frozen=True)
class Figure:
    """One figure of a run, and the words for its changes."""

    name: str
    read: Reader
    worse: str
    better: str
    form: str
    more_is_better: bool = False

    def shown(self, extent: Extent | None) -> str:
        """The value, with its spread if it has one."""
        if extent is None:
            return "not measured"
        value, low, high = (format(number, self.form) for number in extent)
        return value if low == high else f"{value} ({low} to {high})"

    def compare(self, old: Extent | None, new: Extent | None, slack: float = SLACK, least: float = 0.0) -> dict:
        """The row of a figure: it has changed if the spreads do not overlap, and the values differ by more than slack.

        Values below `least` are rounding, and count as equal.
        """
        row = {"figure": self.name, "before": self.shown(old), "now": self.shown(new)}
        if old is None or new is None:
            return row | {"verdict": APART, "worse": False}
        before, now = max(old[0], least), max(new[0], least)
        beyond = abs(now - before) > slack * abs(before) and (new[1] > old[2] or new[2] < old[1])
        worse = beyond and (now < before) == self.more_is_better
        verdict = (self.worse if worse else self.better) if beyond else SAME
        return row | {"change": new[0] / old[0] - 1 if old[0] else 0.0, "verdict": verdict, "worse": worse}


# ---------------------------------------------------------------- before anything runs


def check_like(path: str | Path, old: dict, job: Job, model: str, machine: dict) -> None:
    """Check that the job has the model, the data, the options and the device of the old result.

    Raises:
        NotComparable: it differs; the message names every difference.
    """
    settings, used = old["settings"], "gpu" if job.device == "cuda" else "cpu"
    pairs: list[tuple[str, Any, Any]] = [
        ("model", old["runs"][0]["model"], model),
        ("device", settings.get("device"), job.device),
        ("machine", old["machine"][used], machine[used]),
    ]
    for field in dataclasses.fields(Job):
        if field.name not in FREE:
            pairs.append((field.name, settings.get(field.name, field.default), getattr(job, field.name)))
    pairs.append(("data", Path(settings.get("data") or "").name, Path(job.data or "").name))
    if job.data and "data_sha256" in settings:
        pairs.append(("rows of the data", settings["data_sha256"][:12], digest(job.data)[:12]))
    apart = [f"{name} was {before!r} and is {now!r}" for name, before, now in pairs if before != now]
    if apart:
        raise NotComparable(path=path, differences="; ".join(apart))


def repeated(old: dict) -> tuple[Job, dict]:
    """The job of an old result, and the other arguments of its `Comparison`."""
    settings = old["settings"]
    known = {field.name for field in dataclasses.fields(Job)} - {*PATHS}
    job = Job(**{name: value for name, value in settings.items() if name in known})
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
    pairs = [(figure, figure.read(old), figure.read(new)) for figure in FIGURES]
    return [common | figure.compare(before, now) for figure, before, now in pairs if before or now]


def compare_errors(system: str, old: list[dict], new: list[dict]) -> list[dict]:
    """Gradient errors over all parameters, and of families whose errors changed.

    A family has fewer parameters, so its errors vary more by chance, and its limit is wider.
    """
    groups = [{"all parameters": rows} | families(rows) if rows else {} for rows in (old, new)]
    rows = []
    for name in dict.fromkeys([*groups[0], *groups[1]]):
        whole = name == "all parameters"
        figure = Figure(f"gradient error, {name}", point, "less exact", "more exact", ".2e")
        errors = [median(row["error"] for row in group[name]) if name in group else None for group in groups]
        row = figure.compare(*map(point, errors), slack=(TIE if whole else LIMIT) - 1, least=ORDER)
        if whole or row["verdict"] != SAME:
            rows.append({"system": system, "shape": ""} | row)
    return rows


# ---------------------------------------------------------------- figures and their spread


def point(value: float | None) -> Extent | None:
    """A value without a spread."""
    return None if value is None else (value, value, value)


def speed(run: dict) -> Extent:
    """Tokens/s; its spread is the range over seeds, or the quartiles of the steps of a single seed."""
    value, middle = run["tokens_per_s"], run["step_ms"]["median"]
    if given := run.get("spread", {}).get("tokens_per_s"):
        return value, *given
    faster, slower = quartile_distances(run)
    return value, value * middle / (middle + slower), value * middle / (middle - faster)


def plain(key: str, scale: float = 1) -> Reader:
    """Reads a figure by its key, divided by the scale; its spread is the range over seeds."""

    def read(run: dict) -> Extent | None:
        if run.get(key) is None:
            return None
        low, high = run.get("spread", {}).get(key) or (run[key], run[key])
        return run[key] / scale, low / scale, high / scale

    return read


def loss(key: str) -> Reader:
    """Reads a loss; its spread is the range over seeds, or the noise of a batch for a single seed."""

    def read(run: dict) -> Extent | None:
        value = run["losses"][-1] if key == "last_loss" else run.get(key)
        if value is None:
            return None
        noise = batch_noise(run["losses"])
        return value, *run.get("spread", {}).get(key, (value - noise, value + noise))

    return read


FIGURES = (
    Figure("tokens/s", speed, "slower", "faster", ",.0f", more_is_better=True),
    Figure("peak memory, GiB", plain("peak_gib"), "more memory", "less memory", ",.2f"),
    Figure("saved for backward, MiB", plain("saved_bytes", 2**20), "more memory", "less memory", ",.1f"),
    Figure("last loss", loss("last_loss"), "less exact", "more exact", ".4f"),
    Figure("held-out loss", loss("held_out_after"), "less exact", "more exact", ".4f"),
)
