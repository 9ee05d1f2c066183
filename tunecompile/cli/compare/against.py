"""A result beside an older one: what got slower, needs more memory or is less exact, by more than both spread; and what cannot be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunecompile.cli.compare.curves import batch_noise
from tunecompile.cli.compare.data import digest
from tunecompile.cli.compare.errors import NotComparable
from tunecompile.cli.compare.gradients import families
from tunecompile.cli.compare.meters import median
from tunecompile.cli.compare.plots import quartile_distances
from tunecompile.cli.compare.seeds import merge_seeds
from tunecompile.cli.compare.spec import Job
from tunecompile.verification.tolerance import LIMIT, ORDER, TIE

SLACK = 0.02  # clocks, allocators and other processes move a figure by this share from one day to the next
SAME, APART = "same", "not comparable"
OPTIONS = (
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
)  # other values make another measurement
CHECKS = (
    ("tunecompile", "gradients"),
    ("tunecompile-fp8", "reduced_gradients"),
)  # whose gradients a result has, and where

Extent = tuple[float, float, float]  # a figure, and from where to where it spreads


@dataclass(frozen=True)
class Figure:
    """One figure of a run, and the words for what became of it."""

    name: str
    read: Callable[[dict], Extent | None]
    worse: str
    better: str
    more_is_better: bool = False
    form: str = ",.2f"


# ---------------------------------------------------------------- before anything runs


def check_like(path: str | Path, old: dict, job: Job, model: str, machine: dict) -> None:
    """Whether the job measures what the old result did: model, data and options, on the same device.

    Raises:
        NotComparable: it does not; every difference is named.
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
    return machine["gpu"] if device == "cuda" else machine["cpu"]


def repeated(old: dict) -> tuple[Job, dict]:
    """The job of an old result, and what a Comparison needs beside it: to measure the same again."""
    settings = old["settings"]
    known = {field.name for field in dataclasses.fields(Job)}
    job = Job(
        **{name: value for name, value in settings.items() if name in known} | {"adapter": None, "gradients": None}
    )
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
    """A row for every figure of every system and shape of either result: `verdict` is what became of it, `worse` whether that is bad."""
    before, now = ({(run["system"], run["shape"]): run for run in merge_seeds(result["runs"])} for result in (old, new))
    rows = [row for key in dict.fromkeys([*before, *now]) for row in compare_runs(*key, before.get(key), now.get(key))]
    for system, field in CHECKS:
        if old.get(field) or new.get(field):
            rows += compare_errors(system, old.get(field) or [], new.get(field) or [])
    return rows


def compare_runs(system: str, shape: str, old: dict | None, new: dict | None) -> list[dict]:
    fine = [run is not None and run["status"] == "ok" for run in (old, new)]
    said = {"before": old["status"] if old else "not run", "now": new["status"] if new else "not run"}
    common = {"system": system, "shape": shape}
    if not all(fine):
        broken = fine[0] and new is not None and new["status"] != "not installed"
        return [common | said | {"figure": "whole run", "verdict": "fails" if broken else APART, "worse": broken}]
    rows = []
    for figure in FIGURES:
        extents = figure.read(old), figure.read(new)
        if None in extents:
            if any(extents):
                rows.append(common | apart(figure.name, *(figure.form if e else "" for e in extents), *extents))
            continue
        rows.append(common | judged(figure, *extents, SLACK))
    return rows


def compare_errors(system: str, old: list[dict], new: list[dict]) -> list[dict]:
    """Gradient errors over all parameters, and of each family where there is something to say; of a family's few parameters more is chance."""
    groups = [{"all parameters": rows} | families(rows) if rows else {} for rows in (old, new)]
    rows = []
    for name in dict.fromkeys([*groups[0], *groups[1]]):
        figure = dataclasses.replace(ERROR, name=f"gradient error, {name}")
        extents = [point(median([row["error"] for row in group[name]])) if name in group else None for group in groups]
        if None in extents:
            found = apart(figure.name, *(figure.form if e else "" for e in extents), *extents)
        else:
            whole = name == "all parameters"
            found = judged(figure, *extents, (TIE if whole else LIMIT) - 1, least=ORDER)
            if found["verdict"] == SAME and not whole:
                continue
        rows.append({"system": system, "shape": ""} | found)
    return rows


def judged(figure: Figure, old: Extent, new: Extent, slack: float, least: float = 0.0) -> dict:
    """Another only where the spreads lie apart, and the figures by more than the slack. What is below `least` is rounding, and all the same."""
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


def apart(name: str, form: str, other: str, old: Extent | None, new: Extent | None) -> dict:
    return {
        "figure": name,
        "before": format(old[0], form) if old else "not measured",
        "now": format(new[0], other) if new else "not measured",
        "verdict": APART,
        "worse": False,
    }


def shown(figure: Figure, extent: Extent) -> str:
    value, low, high = (format(number, figure.form) for number in extent)
    return value if low == high else f"{value} ({low} to {high})"


# ---------------------------------------------------------------- figures and their spread


def point(value: float) -> Extent:
    return value, value, value


def speed(run: dict) -> Extent:
    """Of several seeds from the lowest to the highest; of one, the quartiles of its steps."""
    value, middle = run["tokens_per_s"], run["step_ms"]["median"]
    if given := run.get("spread", {}).get("tokens_per_s"):
        return value, *given
    faster, slower = quartile_distances(run)
    return value, value * middle / (middle + slower), value * middle / (middle - faster)


def plain(key: str, scale: float = 1) -> Callable[[dict], Extent | None]:
    def read(run: dict) -> Extent | None:
        if run.get(key) is None:
            return None
        low, high = run.get("spread", {}).get(key) or (run[key], run[key])
        return run[key] / scale, low / scale, high / scale

    return read


def loss(key: str, read: Callable[[dict], float | None]) -> Callable[[dict], Extent | None]:
    """Of several seeds from the lowest to the highest; of one, what another batch would have done to it."""

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
ERROR = Figure("gradient error", point, "less exact", "more exact", form=".2e")
