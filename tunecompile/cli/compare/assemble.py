"""From the workers' results to one result in the common JSON shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tunecompile.cli.compare import data, machine, models
from tunecompile.cli.compare.curves import compare_curves, judge_curves, merge_seeds
from tunecompile.cli.compare.judge import EAGER, Check, judge_speed, judge_work
from tunecompile.cli.compare.request import Comparison
from tunecompile.cli.compare.spec import REDUCED, Job, System
from tunecompile.estimate.known_shapes import is_mixture, shape_config
from tunecompile.planner.device_memory import HostGauge, budget_bytes


def assemble(comparison: Comparison, outcome: Mapping[str, dict], reference: dict | None, check: Check) -> dict:
    """The common JSON shape, and what the report shows besides.

    Args:
        comparison: what was compared.
        outcome: the workers' results by system. A system without one is reported as not installed.
        reference: the result of the reference's worker, if there was one.
        check: what the comparison with the reference showed.
    """
    runs = all_runs(comparison, outcome)
    merged = merge_seeds(runs)
    verdicts = [*check.verdicts, *judge_curves(merged), *judge_work(merged), *judge_speed(merged)]
    budgeted = next((outcome[name] for name in outcome if name.startswith("tunecompile@")), {})
    ours, reduced = (
        outcome.get("tunecompile", budgeted),
        next((outcome[name] for name in REDUCED if name in outcome), {}),
    )
    compiler = ours.get("report") or reduced.get("report") or {}
    notes = [*(compiler.get("notes") or []), *((reduced.get("report") or {}).get("notes") or [])]
    result = machine.header() | {
        "runs": runs,
        "matches": compiler.get("matches", []),
        "gradients": check.gradients,
        "reduced_gradients": check.reduced,
        "curves": compare_curves(merged),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "compiler": {key: compiler.get(key) for key in ("regions", "compiles")} | {"notes": list(dict.fromkeys(notes))},
        "answers": ours.get("answers", []),
        "settings": settings_of(comparison, outcome),
        "spent_s": {name: part["spent_s"] for name, part in outcome.items() if "spent_s" in part},
    }
    if reference and reference.get("runs") and reference["runs"][0].get("status") == "ok":
        result["reference"] = {
            "dtype": str(models.reference_dtype(comparison.job)).removeprefix("torch."),
            "losses": reference["runs"][0]["losses"],
        }
    return result


def all_runs(comparison: Comparison, outcome: Mapping[str, dict]) -> list[dict]:
    """A run for each system, shape and seed."""
    job = comparison.job
    runs = [
        run
        for order, system in enumerate(comparison.systems)
        for run in runs_of(comparison, system, outcome.get(system.name), order)
    ]
    if job.device == "cuda":
        clock = machine.gpu_clock_mhz()
        runs = [run | {"clock_mhz": clock} if run["status"] == "ok" else run for run in runs]
    for run in runs:
        if run["status"] == "ok" and run is not (eager := eager_beside(run, runs)):
            run["break_even_step"] = break_even(run, eager)
    return runs


def runs_of(comparison: Comparison, system: System, result: dict | None, order: int) -> list[dict]:
    """The runs of one system. result: of its worker; None if the system is not installed."""
    job = comparison.job
    about: dict[str, Any] = {
        "system": system.name,
        "model": comparison.model_name,
        "mode": job.mode,
        "budget_gib": None,
        "gpus": job.gpus * (job.device == "cuda"),
        "parallel": job.parallel if job.gpus > 1 else None,
        "optimizer": "adamw-fused",
        **parts_of(job),
        "version": machine.version_of(system.distribution),
    }
    if result is None:
        result = {"status": "not installed"}
        about["install"] = f"pip install {system.distribution}"
    about |= budget_of(system) | {"attention": result.get("attention"), "order": order}
    failed = [{"shape": shape, "status": result.get("status")} for shape in job.shapes or (job.shape,)]
    return [about | row for row in result.get("runs") or failed]


def parts_of(job: Job) -> dict[str, Any]:
    """How many of a shape model's layers were trained, where not all; and whether a mixture's experts were adapted."""
    if not models.is_shape(job.model):
        return {}
    mixed = job.mode != "full" and is_mixture(shape_config(job.model))
    layers = {} if job.layers is None else {"layers": job.layers}
    rank = {} if job.mode == "full" or job.rank == Job.rank else {"rank": job.rank}
    return layers | rank | ({"experts": job.experts} if mixed else {})


def eager_beside(run: dict, runs: list[dict]) -> dict | None:
    """Eager's finished run with the same shape and seed."""
    place = (run["shape"], run.get("seed"))
    return next(
        (r for r in runs if r["system"] in EAGER and r["status"] == "ok" and (r["shape"], r.get("seed")) == place),
        None,
    )


def break_even(run: dict, eager: dict | None) -> int | None:
    """The step at which compilation has paid for its time; None: never."""
    if not eager or run["step_ms"]["median"] >= eager["step_ms"]["median"]:
        return None
    extra_ms = max(0.0, (run["first_step_s"] - eager["first_step_s"]) * 1e3)
    return 1 + math.ceil(extra_ms / (eager["step_ms"]["median"] - run["step_ms"]["median"]))


def budget_of(system: System) -> dict:
    """The budget in GiB, if the system has one."""
    if system.memory is None:
        return {}
    allowed = budget_bytes(system.memory, HostGauge())
    return {"budget_gib": allowed / 2**30 if isinstance(allowed, int) else None}


def settings_of(comparison: Comparison, outcome: Mapping[str, dict]) -> dict:
    """The job's settings, and how many rows of the data were used."""
    job = comparison.job
    return (
        job.to_dict()
        | ({"data_sha256": data.digest(job.data)} if job.data else {})
        | {
            "seeds": comparison.seeds,
            "turns": comparison.turns,
            "rows": next((r["rows"] for r in outcome.values() if "rows" in r), None),
            "dropped_rows": next((r["dropped_rows"] for r in outcome.values() if "dropped_rows" in r), 0),
        }
    )
