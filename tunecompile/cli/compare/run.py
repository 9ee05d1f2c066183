"""The comparison: check what was asked for, run every system and the reference, judge, and collect one result."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tunecompile.cli.compare import data, machine, models
from tunecompile.cli.compare.curves import compare_curves, judge_curves
from tunecompile.cli.compare.errors import BadOption, DataMissing, MissingExtra, ShapeWithData
from tunecompile.cli.compare.meters import WARMUP
from tunecompile.cli.compare.processes import Listener, Worker, run_workers
from tunecompile.cli.compare.seeds import merge_seeds
from tunecompile.cli.compare.shapes import save_shape_model
from tunecompile.cli.compare.spec import REFERENCE, Job, System, parse_shape
from tunecompile.errors import TunecompileError
from tunecompile.estimate.known_shapes import SHAPES
from tunecompile.planner.device_memory import HostGauge, budget_bytes
from tunecompile.verification.tolerance import Verdict, compare_gradients, judge_gradients, judge_loss

STEP_LIMIT = 1.05  # a step may take this much of eager's
COMPILING = ("compile", "compile-layers", "tunecompile")  # engines that keep caches of compiled code
CHECK_LAYERS = 2  # depth at which a shape model is checked against fp32
CHECK_LENGTH = 8192  # and length: attention in fp32 holds a row's scores, 128 GiB of 32,768 tokens


@dataclass(frozen=True)
class Comparison:
    """What to compare. `job` is the template; each system's job differs in its name only."""

    systems: list[System]
    job: Job
    out: Path
    name: str = ""  # the model's name in the results; "": its folder's
    reference_steps: int = 10
    seeds: int = 1  # so many repetitions; checks and answers are those of the first
    check: bool = True
    turns: bool = False
    warm: bool = (
        False  # measure the first step of compiling systems once more, in another process that finds the caches filled
    )
    keep: Callable[[dict], None] = field(
        default=lambda result: None
    )  # is given the result before it is checked, lest that fail
    listen: Listener = field(default=lambda system, event, fields: None)

    @property
    def model_name(self) -> str:
        return self.name or Path(self.job.model).name


class WorkerFailed(TunecompileError):
    template = "{message}"


# ---------------------------------------------------------------- before anything starts


def check_request(comparison: Comparison) -> None:
    """Every mistake that can be found without training, found at once."""
    job = comparison.job
    if job.steps <= WARMUP:
        raise BadOption(
            option="--steps",
            value=job.steps,
            reason=f"the first {WARMUP} steps are not timed, so take at least {WARMUP + 1}",
        )
    if job.loss == "dpo":
        check_dpo(job)
    check_gpus(job)
    need("the comparison", {"transformers": "hf", "accelerate": "hf"})
    if job.mode != "full":
        need(f"--{job.mode}", {"peft": "hf"})
    if job.mode == "qlora":
        need("--qlora", {"bitsandbytes": "qlora"})
    models.check_model(job.model)
    if job.shapes:
        return
    if models.is_shape(job.model):
        raise ShapeWithData(model=job.model)
    if job.trainer == "sft":
        need("--trainer sft", {"trl": "trl", "datasets": "trl"})
    if job.data is None:
        raise DataMissing(shapes=", ".join(SHAPES))
    rows = data.read_rows(job.data, job.loss)
    if Path(job.model).exists():  # a hub model's tokenizer is fetched by the first worker
        data.split_rows(rows, models.load_tokenizer(job), job)


def check_gpus(job: Job) -> None:
    import torch

    there = torch.cuda.device_count() if job.device == "cuda" else os.cpu_count() or 1
    if job.gpus > there:
        raise BadOption(
            option="--gpus", value=job.gpus, reason=f"this machine has {there}" + " cores" * (job.device != "cuda")
        )
    if job.gpus > 1 and job.trainer == "sft" and job.parallel not in ("ddp", "device_map"):
        raise BadOption(
            option="--parallel",
            value=job.parallel,
            reason="trainers take their engine from accelerate's config, so use --trainer loop",
        )
    if job.gpus > 1 and job.parallel == "zero3" and importlib.util.find_spec("deepspeed") is None:
        raise BadOption(
            option="--parallel", value=job.parallel, reason="DeepSpeed is not installed: pip install deepspeed"
        )
    if job.gpus > 1 and job.parallel == "zero3" and len(job.shapes) > 1:
        raise BadOption(
            option="--shape", value=",".join(job.shapes), reason="DeepSpeed takes a model once, so give one shape"
        )


def check_dpo(job: Job) -> None:
    for wrong, reason in (
        (job.mode == "full", "its reference is the model without its adapter, so use --lora or --qlora"),
        (job.batching == "packed", "its pairs are padded, so leave --batching out"),
        (bool(job.shapes), "it needs rows with prompt, chosen and rejected: give --data, and a model with a tokenizer"),
    ):
        if wrong:
            raise BadOption(option="--loss", value=job.loss, reason=reason)


def need(what: str, packages: dict[str, str]) -> None:
    for package, extra in packages.items():
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(what=what, package=package, extra=extra)


# ---------------------------------------------------------------- the runs


def run_comparison(comparison: Comparison) -> dict:
    """All systems, then the reference and the verdicts. Returns the result in the common JSON shape, and a little more."""
    check_request(comparison)
    job = comparison.job
    logs = comparison.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tunecompile-gradients-") as scratch, shape_on_disk(comparison) as folder:
        checked_here = (
            comparison.check and not job.shapes and job.gpus == 1
        )  # a shape model is checked at a smaller depth, separately

        def job_for(system: System) -> Job:
            own = job.replace(system=system.name, model=folder if folder and system.engine == "unsloth" else job.model)
            if system.name != "tunecompile":
                own = own.replace(questions=0, adapter=None)
            checked = checked_here and system.engine in ("hf", "tunecompile")
            return own.replace(gradients=f"{scratch}/{system.name}.pt" if checked else None)

        present = [system for system in comparison.systems if system.installed]
        caches = {
            system.name: f"{scratch}/{system.name}-caches"
            for system in present
            if comparison.warm and system.engine in COMPILING
        }
        results = run_jobs([job_for(system) for system in present], comparison, logs, caches=caches)
        outcome = dict(zip((system.name for system in present), results))
        repeat_seeds([job_for(system) for system in present], outcome, comparison, logs)
        measure_warm_starts(
            [job_for(system) for system in present if system.name in caches], outcome, comparison, logs, caches
        )
        reference, check = None, Check()
        if checked_here:
            reference = run_jobs([reference_job(job, comparison, scratch)], comparison, logs)[0]
            check = judge(outcome, reference, scratch, job)
        elif comparison.check and any(system.engine == "tunecompile" for system in present):
            comparison.keep(assemble(comparison, outcome, reference, check))
            check = check_apart(comparison, present, scratch, logs)
    return assemble(comparison, outcome, reference, check)


@contextlib.contextmanager
def shape_on_disk(comparison: Comparison):
    """A folder with the shape model's weights for the system that can only load from disk; None where nobody needs it."""
    job = comparison.job
    if not (models.is_shape(job.model) and any(s.engine == "unsloth" and s.installed for s in comparison.systems)):
        yield None
        return
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="tunecompile-shape-", dir=memory if memory.is_dir() else None) as folder:
        # in a process of its own, so that no memory of the device stays taken
        maker = multiprocessing.get_context("spawn").Process(
            target=save_shape_model,
            args=(job.model, folder),
            kwargs={"seed": job.seed, "device": job.device, "layers": job.layers, "quantise": job.mode == "qlora"},
        )
        maker.start()
        maker.join()
        yield folder


def run_jobs(
    jobs: list[Job],
    comparison: Comparison,
    logs: Path,
    task: str = "train",
    caches: dict[str, str] | None = None,
    at_once: bool = False,
) -> list[dict]:
    turns = comparison.turns and len(jobs) > 1 and not at_once
    results = run_workers(
        [Worker(job, logs, comparison.listen, turns, task, (caches or {}).get(job.system)) for job in jobs], at_once
    )
    for job, result in zip(jobs, results):
        if "user_error" in result:
            raise WorkerFailed(message=result["user_error"])
        comparison.listen(job.system, "done", {"status": result.get("status", "ok")})
    return results


def repeat_seeds(jobs: list[Job], outcome: dict, comparison: Comparison, logs: Path) -> None:
    """The same once more for every further seed, in processes of their own; the rows are added to those of the first. Every system that ran has its
    turn with one seed before any has with the next, so that the machine's weather falls on all alike."""
    jobs = [job for job in jobs if any(row["status"] == "ok" for row in outcome[job.system].get("runs", []))]
    for repeat in range(1, comparison.seeds):
        again = [
            job.replace(repeat=repeat, saved_bytes=False, launches=False, gradients=None, questions=0, adapter=None)
            for job in jobs
        ]
        for job, result in zip(again, run_jobs(again, comparison, logs)):
            lost = [
                {"shape": shape, "seed": job.draw, "status": result.get("status", "ok")}
                for shape in job.shapes or (job.shape,)
            ]
            outcome[job.system]["runs"] += result.get("runs") or lost


def measure_warm_starts(
    jobs: list[Job], outcome: dict, comparison: Comparison, logs: Path, caches: dict[str, str]
) -> None:
    """One step in a new process with the caches of the first one; its seconds go into the first one's rows."""
    if not jobs:
        return
    once = [
        job.replace(steps=1, saved_bytes=False, launches=False, gradients=None, questions=0, adapter=None)
        for job in jobs
    ]
    for job, again in zip(once, run_jobs(once, comparison, logs, caches=caches)):
        for row, warm in zip(outcome[job.system].get("runs", []), again.get("runs", [])):
            if row["status"] == warm["status"] == "ok":
                row["first_step_warm_s"] = warm["first_step_s"]


def reference_job(job: Job, comparison: Comparison, scratch: str) -> Job:
    return job.replace(
        system=REFERENCE,
        steps=min(comparison.reference_steps, job.steps),
        gradients=f"{scratch}/{REFERENCE}.pt",
        questions=0,
        held_out=job.held_out,
        adapter=None,
        checkpointing=False,
    )


def check_apart(comparison: Comparison, present: list[System], scratch: str, logs: Path) -> Check:
    """In runs of their own, of one process each. A shape model at full depth would not fit in fp32: the same layers, a few of them, stand for it, and
    what runs under a budget is checked without, as a few layers fit any."""
    checked = [s for s in present if s.engine in ("hf", "tunecompile")]
    one = comparison.job.replace(gpus=1, saved_bytes=False, launches=False, held_out=0, questions=0, adapter=None)
    shallow = (
        one.replace(
            layers=CHECK_LAYERS,
            shapes=tuple(str(parse_shape(shape).within(CHECK_LENGTH)) for shape in one.shapes[:1]),
            steps=WARMUP + 1,
        )
        if one.shapes
        else one.replace(steps=max(WARMUP + 1, min(comparison.reference_steps, one.steps)))
    )
    names = list(dict.fromkeys(s.unbudgeted for s in checked))
    if not any(s.engine == "hf" for s in checked):
        names.insert(0, "hf")  # eager's own error is the yardstick, whoever else was timed
    jobs = [shallow.replace(system=name, gradients=f"{scratch}/{name}.pt") for name in names]
    jobs.append(shallow.replace(system=REFERENCE, gradients=f"{scratch}/{REFERENCE}.pt", checkpointing=False))
    outcome = run_untimed(jobs, comparison, logs)
    return judge(outcome, outcome.pop(REFERENCE), scratch, shallow)


def run_untimed(jobs: list[Job], comparison: Comparison, logs: Path) -> dict:
    """By system. On a GPU all at once, as most of their time goes into starting up; one for which there is no room beside the others runs alone."""
    at_once = comparison.job.device == "cuda"
    outcome = dict(zip((job.system for job in jobs), run_jobs(jobs, comparison, logs, at_once=at_once)))
    crowded = (
        [
            job
            for job in jobs
            if any(row.get("status") == "oom" for row in (outcome[job.system], *outcome[job.system].get("runs", [])))
        ]
        if at_once
        else []
    )
    if crowded:
        outcome |= dict(zip((job.system for job in crowded), run_jobs(crowded, comparison, logs)))
    return outcome


# ---------------------------------------------------------------- the judgement


@dataclass(frozen=True)
class Check:
    """What the high-precision reference said: gradient errors of tunecompile, and of it in a reduced precision, and verdicts."""

    gradients: list[dict] = field(default_factory=list)
    reduced: list[dict] = field(
        default_factory=list
    )  # shown beside eager's, but not judged: rounding is what was asked for
    verdicts: list[Verdict] = field(default_factory=list)


def first_ok(outcome: dict, engine: str) -> tuple[str, dict] | None:
    """The first run of eager, or of that system, that went well, with its system's name."""
    for name in ("hf", "hf-checkpoint") if engine == "hf" else (engine,):
        runs = outcome.get(name, {}).get("runs", [])
        if runs and runs[0].get("status") == "ok":
            return name, runs[0]
    return None


def judge(outcome: dict, reference: dict, scratch: str, job: Job) -> Check:
    """Loss and gradients of tunecompile beside eager's, both against the reference."""
    import torch

    eager, ours, reduced = (first_ok(outcome, name) for name in ("hf", "tunecompile", "tunecompile-fp8"))
    exact = first_ok({"hf": reference}, "hf")
    if not (eager and exact and (ours or (reduced and "tunecompile" not in outcome))):
        lacking = [name for name, run in (("eager", eager), ("tunecompile", ours), ("the reference", exact)) if not run]
        return Check(
            verdicts=[
                Verdict("compared with eager and the reference", False, f"no finished run of {', '.join(lacking)}")
            ]
        )

    def rows_of(system: tuple[str, dict] | None) -> list[dict]:
        files = [torch.load(f"{scratch}/{name}.pt") for name in (REFERENCE, eager[0], system[0])] if system else []
        return compare_gradients(*(file["gradients"] for file in files), getattr(torch, job.dtype)) if system else []

    rows = rows_of(ours)
    verdicts = (
        [judge_loss(exact[1]["losses"], eager[1]["losses"], ours[1]["losses"]), *judge_gradients(rows)] if ours else []
    )
    return Check(rows, rows_of(reduced), verdicts)


def judge_speed(runs: list[dict]) -> list[Verdict]:
    """Time and memory of tunecompile beside eager's, on the first shape. runs: seeds laid together."""
    fine = {run["system"]: run for run in runs if run["status"] == "ok" and run["shape"] == runs[0]["shape"]}
    eager, ours = fine.get("hf") or fine.get("hf-checkpoint"), fine.get("tunecompile")
    if not (eager and ours):
        return []
    before, after = eager["step_ms"]["median"], ours["step_ms"]["median"]
    verdicts = [
        Verdict(
            f"a step takes at most {STEP_LIMIT} of eager's time",
            after <= STEP_LIMIT * before,
            f"{after / before:.3f}: {after:.1f} ms against {before:.1f} ms",
        )
    ]
    if "saved_bytes" in eager and "saved_bytes" in ours:
        before, after = eager["saved_bytes"], ours["saved_bytes"]
        verdicts.append(
            Verdict(
                "fewer bytes saved for backward than eager",
                after < before,
                f"{after / before:.3f}: {after / 2**20:.1f} MiB against {before / 2**20:.1f} MiB",
            )
        )
    return verdicts


def judge_work(runs: list[dict]) -> list[Verdict]:
    """Whether all systems did the same: one that trains an adapter where the others train the model is fast and small."""
    trainable = {run["system"]: run["trainable"] for run in runs if run.get("trainable")}
    said = ", ".join(f"{system} {count:,}" for system, count in trainable.items())
    return (
        [Verdict("every system trains as many values", len(set(trainable.values())) == 1, said)]
        if len(trainable) > 1
        else []
    )


def break_even(run: dict, eager: dict | None) -> int | None:
    """The step after which the seconds spent on compiling are won back; None: never."""
    if not eager or run["step_ms"]["median"] >= eager["step_ms"]["median"]:
        return None
    extra_ms = max(0.0, (run["first_step_s"] - eager["first_step_s"]) * 1e3)
    return 1 + math.ceil(extra_ms / (eager["step_ms"]["median"] - run["step_ms"]["median"]))


def assemble(comparison: Comparison, outcome: dict, reference: dict | None, check: Check) -> dict:
    """The common JSON shape, with what the report shows beside."""
    job = comparison.job
    common = {
        "model": comparison.model_name,
        "mode": job.mode,
        "budget_gib": None,
        "gpus": job.gpus * (job.device == "cuda"),
        "parallel": job.parallel if job.gpus > 1 else None,
        "optimizer": "adamw-fused",
    }
    runs = []
    for order, system in enumerate(comparison.systems):
        away = {"status": "not installed", "install": f"pip install {system.distribution}"}
        result = outcome.get(system.name, away)
        about = {"version": machine.version_of(system.distribution)} | (
            {"install": away["install"]} if result is away else {}
        )
        rows = result.get("runs") or [
            {"shape": shape, "status": result["status"]} for shape in job.shapes or (job.shape,)
        ]
        for row in rows:
            runs.append(
                {"system": system.name}
                | common
                | about
                | budget_of(system)
                | {"attention": result.get("attention"), "order": order}
                | row
            )
    if job.device == "cuda":
        clock = machine.gpu_clock_mhz()
        runs = [run | {"clock_mhz": clock} if run["status"] == "ok" else run for run in runs]
    for run in runs:
        like = [
            r for r in runs if r["status"] == "ok" and (r["shape"], r.get("seed")) == (run["shape"], run.get("seed"))
        ]
        eager = next((r for r in like if r["system"] in ("hf", "hf-checkpoint")), None)
        if run["status"] == "ok" and run is not eager:
            run["break_even_step"] = break_even(run, eager)
    together = merge_seeds(runs)
    within = next((outcome[name] for name in outcome if name.startswith("tunecompile@")), {})
    ours, reduced = outcome.get("tunecompile", within), outcome.get("tunecompile-fp8", {})
    report = ours.get("report") or reduced.get("report") or {}
    notes = [*(report.get("notes") or []), *((reduced.get("report") or {}).get("notes") or [])]
    result = machine.header() | {
        "runs": runs,
        "matches": report.get("matches", []),
        "gradients": check.gradients,
        "reduced_gradients": check.reduced,
        "curves": compare_curves(together),
        "verdicts": [
            asdict(v) for v in check.verdicts + judge_curves(together) + judge_work(together) + judge_speed(together)
        ],
        "compiler": {key: report.get(key) for key in ("regions", "compiles")} | {"notes": list(dict.fromkeys(notes))},
        "answers": ours.get("answers", []),
        "settings": job.to_dict()
        | ({"data_sha256": data.digest(job.data)} if job.data else {})
        | {
            "seeds": comparison.seeds,
            "turns": comparison.turns,
            "rows": next((r["rows"] for r in outcome.values() if "rows" in r), None),
            "dropped_rows": next((r["dropped_rows"] for r in outcome.values() if "dropped_rows" in r), 0),
        },
    }
    if reference and reference.get("runs") and reference["runs"][0].get("status") == "ok":
        result["reference"] = {
            "dtype": str(models.reference_dtype(job)).removeprefix("torch."),
            "losses": reference["runs"][0]["losses"],
        }
    return result


def budget_of(system: System) -> dict:
    """The budget in GiB, where the system has one."""
    if system.memory is None:
        return {}
    allowed = budget_bytes(system.memory, HostGauge())
    return {"budget_gib": allowed / 2**30 if isinstance(allowed, int) else None}


def passed(result: dict) -> bool:
    """Whether every system that could run ran, every verdict holds, and nothing got worse since an older result."""
    return (
        all(v["passed"] for v in result["verdicts"])
        and all(r["status"] in ("ok", "not installed") for r in result["runs"])
        and not any(row["worse"] for row in result.get("against", {}).get("rows", []))
    )
