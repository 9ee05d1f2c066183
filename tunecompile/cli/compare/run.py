"""The comparison: check the request, run every system and the reference, judge, and collect one result."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tunecompile.cli.compare import models
from tunecompile.cli.compare.assemble import assemble
from tunecompile.cli.compare.judge import Check, judge
from tunecompile.cli.compare.meters import WARMUP
from tunecompile.cli.compare.processes import Worker, run_workers
from tunecompile.cli.compare.request import Comparison, check_request, ignore
from tunecompile.cli.compare.shapes import save_shape_model
from tunecompile.cli.compare.spec import REFERENCE, Job, System, parse_shape
from tunecompile.errors import UsageError

COMPILING = ("compile", "compile-layers", "tunecompile")  # engines with caches of compiled code
CHECKED = ("hf", "tunecompile")  # engines whose gradients are compared with the reference
CHECK_LAYERS = 2  # depth at which a shape model is checked against fp32
CHECK_STEPS = 8  # of them: where tokens change experts by rounding, the mean of four losses is luck
CHECK_LENGTH = 8192  # and length: attention in fp32 holds a row's scores, 128 GiB of 32,768 tokens


class WorkerFailed(UsageError):
    """Raised for a `UsageError` of a worker, with its message."""

    template = "{message}"


def run_comparison(comparison: Comparison) -> dict:
    """Run all systems and the reference, and judge them.

    Returns:
        The result in the common JSON shape, and what the report shows besides.

    Raises:
        UsageError, MissingExtra: the request has a mistake.
    """
    check_request(comparison)
    job = comparison.job
    logs = comparison.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    check_here = comparison.check and not job.shapes and job.gpus == 1  # a shape model is checked with fewer layers
    present = [system for system in comparison.systems if system.installed]
    check_too = comparison.check and not check_here and any(system.engine == "tunecompile" for system in present)
    with tempfile.TemporaryDirectory(prefix="tunecompile-gradients-") as scratch, contextlib.ExitStack() as stack:
        folder, written = stack.enter_context(shape_on_disk(comparison))
        jobs = [job_for(system, job, folder, scratch if check_here else None) for system in present]
        caches = {
            system.name: f"{scratch}/{system.name}-caches"
            for system in present
            if comparison.warm and system.engine in COMPILING
        }
        checks = check_jobs(comparison, present, scratch) if check_too else []
        waiting = stack.enter_context(started_ahead([*checks, *jobs], comparison, logs, caches))
        written()
        reference, check = None, Check()
        if checks:  # first, while other processes still import
            check = check_apart(checks, scratch, comparison, logs, waiting)
        to_come = ["check"] if check_here else []
        results = run_jobs(
            jobs,
            comparison,
            logs,
            caches=caches,
            waiting=waiting,
            ended=lambda so_far: keep_part(comparison, present, so_far, check, to_come),
        )
        outcome = {system.name: result for system, result in zip(present, results, strict=True)}
        repeat_seeds(jobs, outcome, comparison, logs)
        measure_warm_starts([each for each in jobs if each.system in caches], outcome, comparison, logs, caches)
        if check_here:
            reference = run_jobs([reference_job(job, comparison, scratch)], comparison, logs)[0]
            check = judge(outcome, reference, scratch, job)
    return assemble(comparison, outcome, reference, check)


def keep_part(
    comparison: Comparison, present: Sequence[System], so_far: Sequence[dict], check: Check, to_come: Sequence[str]
) -> None:
    """Hand on the result so far, marked by the names of what is not yet there.

    Args:
        comparison: what is compared.
        present: the installed systems, in their order.
        so_far: results of the first of them; the last one may lack shapes.
        check: what the comparison with the reference showed, if it is over.
        to_come: what else is to come.
    """
    outcome = {system.name: result for system, result in zip(present, so_far, strict=False)}
    missing = [system.name for system in present[len(so_far) :]]
    part = dataclasses.replace(comparison, systems=[s for s in comparison.systems if s.name not in missing])
    for name, result in outcome.items():
        there = {run["shape"] for run in result.get("runs", [])}
        missing += [f"{name} {shape}" for shape in comparison.job.shapes if there and shape not in there]
    comparison.keep(assemble(part, outcome, None, check) | {"incomplete": [*missing, *to_come]})


@contextlib.contextmanager
def started_ahead(
    jobs: Sequence[Job], comparison: Comparison, logs: Path, caches: Mapping[str, str]
) -> Iterator[dict[Job, Worker]]:
    """Processes that import the packages of their jobs and wait, where this machine and comparison suit that.

    Unsloth uses the GPU when it is imported, so it is not started ahead where a memory budget counts what is used.
    """
    budgets = any(job.memory for job in jobs)
    early = [job for job in jobs if comparison.ahead and not (budgets and job.engine == "unsloth")]
    waiting = {
        job: Worker(job, logs, comparison.listen, False, caches=caches_of(job, caches), ahead=True) for job in early
    }
    try:
        for worker in waiting.values():
            worker.start()
        yield waiting
    finally:
        for worker in waiting.values():
            worker.stop()


def caches_of(job: Job, caches: Mapping[str, str]) -> str | None:
    """The folder of compiled code that is kept for a job; that of a check is not."""
    return None if job.shapes and job.gradients else caches.get(job.system)


def job_for(system: System, job: Job, folder: str | None, scratch: str | None) -> Job:
    """The job of one system.

    Args:
        system: the system.
        job: the template.
        folder: the shape model on disk, for a system that needs it there.
        scratch: where checked systems save their gradients; None: nowhere.
    """
    own = job.replace(system=system.name, model=folder if folder and system.engine == "unsloth" else job.model)
    if system.name != "tunecompile":
        own = own.replace(questions=0, adapter=None)
    return own.replace(gradients=f"{scratch}/{system.name}.pt" if scratch and system.engine in CHECKED else None)


@contextlib.contextmanager
def shape_on_disk(comparison: Comparison) -> Iterator[tuple[str | None, Callable[[], None]]]:
    """A folder for the shape model's weights, and a function that waits until they are in it.

    They are for the system that can only load from disk; without it there is no folder.
    """
    job = comparison.job
    if not (models.is_shape(job.model) and any(s.engine == "unsloth" and s.installed for s in comparison.systems)):
        yield None, lambda: None
        return
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="tunecompile-shape-", dir=memory if memory.is_dir() else None) as folder:
        # a separate process, so that this one holds no memory of the device
        maker = multiprocessing.get_context("spawn").Process(
            target=save_shape_model,
            args=(job.model, folder),
            kwargs={"seed": job.seed, "device": job.device, "layers": job.layers, "quantise": job.mode == "qlora"},
        )
        maker.start()
        try:
            yield folder, maker.join
        finally:
            maker.kill()
            maker.join()


def run_jobs(
    jobs: Sequence[Job],
    comparison: Comparison,
    logs: Path,
    task: str = "train",
    caches: Mapping[str, str] | None = None,
    at_once: bool = False,
    ended: Callable[[list[dict]], None] = ignore,
    waiting: Mapping[Job, Worker] | None = None,
) -> list[dict]:
    """Run a worker for each job and return the results in the order of the jobs.

    Args:
        jobs: of one comparison.
        comparison: whether the workers take turns, who listens to them, and how long they may take.
        logs: folder of the workers' files.
        task: of the workers.
        caches: folders of compiled code that are kept, by system; others are removed with the worker.
        at_once: run all workers at the same time.
        ended: called with the results so far whenever a worker has ended or written a part, and others follow.
        waiting: workers that were started ahead.
    """
    turns = comparison.turns and len(jobs) > 1 and not at_once
    ready = waiting or {}
    results = run_workers(
        [
            ready.get(job) or Worker(job, logs, comparison.listen, turns, task, caches_of(job, caches or {}))
            for job in jobs
        ],
        at_once,
        ended,
        comparison.deadline,
    )
    for job, result in zip(jobs, results, strict=True):
        if "user_error" in result:
            raise WorkerFailed(message=result["user_error"])
        comparison.listen(job.system, "done", {"status": result.get("status", "ok")})
    return results


def repeat_seeds(jobs: Sequence[Job], outcome: dict[str, dict], comparison: Comparison, logs: Path) -> None:
    """Run the jobs once more for every further seed, in new processes, and add the rows to those of the first seed.

    All systems run with one seed before any runs with the next, so that other load on the machine affects all alike.
    """
    jobs = [job for job in jobs if any(row["status"] == "ok" for row in outcome[job.system].get("runs", []))]
    for repeat in range(1, comparison.seeds):
        repeated = [untimed(job.replace(repeat=repeat)) for job in jobs]
        for job, result in zip(repeated, run_jobs(repeated, comparison, logs), strict=True):
            lost = [
                {"shape": shape, "seed": job.draw, "status": result.get("status", "ok")}
                for shape in job.shapes or (job.shape,)
            ]
            outcome[job.system]["runs"] += result.get("runs") or lost


def measure_warm_starts(
    jobs: Sequence[Job],
    outcome: dict[str, dict],
    comparison: Comparison,
    logs: Path,
    caches: Mapping[str, str],
) -> None:
    """Time one step in a new process with the caches of the first one, and add the seconds to the first one's rows."""
    if not jobs:
        return
    once = [untimed(job.replace(steps=1)) for job in jobs]
    for job, result in zip(once, run_jobs(once, comparison, logs, caches=caches), strict=True):
        for row, warm in zip(outcome[job.system].get("runs", []), result.get("runs", [])):
            if row["status"] == warm["status"] == "ok":
                row["first_step_warm_s"] = warm["first_step_s"]


def untimed(job: Job) -> Job:
    """The job without the figures of extra steps, the check, and the questions."""
    return job.replace(saved_bytes=False, launches=False, gradients=None, questions=0, adapter=None)


def reference_job(job: Job, comparison: Comparison, scratch: str) -> Job:
    """The job that trains in higher precision."""
    return job.replace(
        system=REFERENCE,
        steps=min(comparison.reference_steps, job.steps),
        gradients=f"{scratch}/{REFERENCE}.pt",
        questions=0,
        adapter=None,
        checkpointing=False,
    )


def check_jobs(comparison: Comparison, present: Sequence[System], scratch: str) -> list[Job]:
    """The jobs of a check in separate runs of one process each; the last is the reference's.

    A few layers represent a shape model, which would not fit in fp32 at full depth. Systems under a budget are checked
    without it, as a few layers fit any budget.
    """
    checked = [s for s in present if s.engine in CHECKED]
    one = untimed(comparison.job.replace(gpus=1, held_out=0))
    shallow = (
        one.replace(
            layers=CHECK_LAYERS,
            shapes=tuple(str(parse_shape(shape).within(CHECK_LENGTH)) for shape in one.shapes[:1]),
            steps=CHECK_STEPS,
        )
        if one.shapes
        else one.replace(steps=max(WARMUP + 1, min(comparison.reference_steps, one.steps)))
    )
    names = list(dict.fromkeys(s.unbudgeted for s in checked))
    if not any(s.engine == "hf" for s in checked):
        names.insert(0, "hf")  # eager's error is the yardstick, even where eager was not timed
    jobs = [shallow.replace(system=name, gradients=f"{scratch}/{name}.pt") for name in names]
    return [*jobs, shallow.replace(system=REFERENCE, gradients=f"{scratch}/{REFERENCE}.pt", checkpointing=False)]


def check_apart(
    jobs: Sequence[Job],
    scratch: str,
    comparison: Comparison,
    logs: Path,
    waiting: Mapping[Job, Worker] | None = None,
) -> Check:
    """Run the jobs of `check_jobs`, and judge them."""
    outcome = run_untimed(jobs, comparison, logs, waiting)
    return judge(outcome, outcome.pop(REFERENCE), scratch, jobs[-1])


def run_untimed(
    jobs: Sequence[Job], comparison: Comparison, logs: Path, waiting: Mapping[Job, Worker] | None = None
) -> dict[str, dict]:
    """Run jobs that are not timed, and return the results by system.

    On a GPU they run at once, as they mostly start up; those that run out of memory beside the others run again alone.
    """
    at_once = comparison.job.device == "cuda"
    results = run_jobs(jobs, comparison, logs, at_once=at_once, waiting=waiting)
    outcome = {job.system: result for job, result in zip(jobs, results, strict=True)}
    crowded = [job for job in jobs if at_once and ran_out_of_memory(outcome[job.system])]
    if crowded:
        outcome |= {
            job.system: result for job, result in zip(crowded, run_jobs(crowded, comparison, logs), strict=True)
        }
    return outcome


def ran_out_of_memory(result: dict) -> bool:
    """Whether a worker, or one of its runs, ran out of memory."""
    return any(row.get("status") == "oom" for row in (result, *result.get("runs", [])))
