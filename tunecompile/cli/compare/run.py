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


class Runner:
    """Runs jobs of a comparison in worker processes, some of which were started ahead.

    Args:
        comparison: whether the workers take turns, who listens to them, and how long they may take.
        caches: folders of compiled code that are kept, by system; others are removed with the worker.
    """

    def __init__(self, comparison: Comparison, caches: Mapping[str, str]):
        self.comparison, self.caches = comparison, caches
        self.logs = comparison.out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.waiting: dict[Job, Worker] = {}

    def worker(self, job: Job, turns: bool) -> Worker:
        """The worker of a job. The compiled code of a check is not kept."""
        caches = None if job.shapes and job.gradients else self.caches.get(job.system)
        return self.waiting.get(job) or Worker(job, self.logs, self.comparison.listen, turns, caches=caches)

    @contextlib.contextmanager
    def started_ahead(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Inside, processes import the packages of these jobs and wait, where this machine and comparison suit that.

        Unsloth uses the GPU when it is imported, so it is not started ahead where a memory budget counts what is used.
        """
        budgets = any(job.memory for job in jobs)
        early = [job for job in jobs if self.comparison.ahead and not (budgets and job.engine == "unsloth")]
        self.waiting = {job: self.worker(job, turns=False) for job in early}
        try:
            for worker in self.waiting.values():
                worker.start()
            yield
        finally:
            for worker in self.waiting.values():
                worker.stop()

    def run(
        self, jobs: Sequence[Job], at_once: bool = False, ended: Callable[[list[dict]], None] = ignore
    ) -> dict[str, dict]:
        """Run a worker for each job and return the results by system, in the order of the jobs.

        Args:
            jobs: of different systems.
            at_once: run all workers at the same time.
            ended: called with the results so far whenever a worker has ended or written a part, and others follow.
        """
        turns = self.comparison.turns and len(jobs) > 1 and not at_once
        workers = [self.worker(job, turns) for job in jobs]
        results = run_workers(workers, at_once, ended, self.comparison.deadline)
        for job, result in zip(jobs, results, strict=True):
            if "user_error" in result:
                raise WorkerFailed(message=result["user_error"])
            self.comparison.listen(job.system, "done", {"status": result.get("status", "ok")})
        return {job.system: result for job, result in zip(jobs, results, strict=True)}

    def run_untimed(self, jobs: Sequence[Job]) -> dict[str, dict]:
        """Run jobs that are not timed, and return the results by system.

        On a GPU they run at once, as they mostly start up; those that run out of memory beside the others run again
        alone.
        """
        at_once = self.comparison.job.device == "cuda"
        outcome = self.run(jobs, at_once)
        crowded = [job for job in jobs if at_once and ran_out_of_memory(outcome[job.system])]
        return outcome | (self.run(crowded) if crowded else {})


def ran_out_of_memory(result: dict) -> bool:
    """Whether a worker, or one of its runs, ran out of memory."""
    return any(row.get("status") == "oom" for row in (result, *result.get("runs", [])))


def run_comparison(comparison: Comparison) -> dict:
    """Run all systems and the reference, and judge them.

    Returns:
        The result in the common JSON shape, and what the report shows besides.

    Raises:
        UsageError, MissingExtra: the request has a mistake.
    """
    check_request(comparison)
    job = comparison.job
    check_here = comparison.check and not job.shapes and job.gpus == 1  # a shape model is checked with fewer layers
    present = [system for system in comparison.systems if system.installed]
    check_too = comparison.check and not check_here and any(system.engine == "tunecompile" for system in present)
    with tempfile.TemporaryDirectory(prefix="tunecompile-gradients-") as scratch, contextlib.ExitStack() as stack:
        folder, written = stack.enter_context(shape_on_disk(comparison))
        jobs = [job_for(system, job, folder, scratch if check_here else None) for system in present]
        compiling = [system.name for system in present if comparison.warm and system.engine in COMPILING]
        runner = Runner(comparison, {name: f"{scratch}/{name}-caches" for name in compiling})
        checks = check_jobs(comparison, present, scratch) if check_too else []
        stack.enter_context(runner.started_ahead([*checks, *jobs]))
        written()
        reference, check = None, Check()
        if checks:  # first, while other processes still import
            checked = runner.run_untimed(checks)
            check = judge(checked, checked.pop(REFERENCE), scratch, checks[-1])

        def keep(so_far: Sequence[dict]) -> None:
            keep_part(comparison, present, so_far, check, ["check"] if check_here else [])

        outcome = runner.run(jobs, ended=keep)
        repeat_seeds(runner, jobs, outcome)
        measure_warm_starts(runner, [each for each in jobs if each.system in compiling], outcome)
        if check_here:
            reference = runner.run([reference_job(job, comparison, scratch)])[REFERENCE]
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


# ---------------------------------------------------------------- jobs


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


def untimed(job: Job) -> Job:
    """The job without the figures of extra steps, the check, and the questions."""
    return job.replace(saved_bytes=False, launches=False, gradients=None, questions=0, adapter=None)


def repeat_seeds(runner: Runner, jobs: Sequence[Job], outcome: dict[str, dict]) -> None:
    """Run the jobs once more for every further seed, in new processes, and add the rows to those of the first seed.

    All systems run with one seed before any runs with the next, so that other load on the machine affects all alike.
    """
    jobs = [job for job in jobs if any(row["status"] == "ok" for row in outcome[job.system].get("runs", []))]
    for repeat in range(1, runner.comparison.seeds):
        repeated = [untimed(job.replace(repeat=repeat)) for job in jobs]
        for job, result in zip(repeated, runner.run(repeated).values(), strict=True):
            about = {"seed": job.draw, "status": result.get("status", "ok")}
            lost = [{"shape": shape} | about for shape in job.shapes or (job.shape,)]
            outcome[job.system]["runs"] += result.get("runs") or lost


def measure_warm_starts(runner: Runner, jobs: Sequence[Job], outcome: dict[str, dict]) -> None:
    """Time one step in a new process with the caches of the first one, and add the seconds to the first one's rows."""
    once = [untimed(job.replace(steps=1)) for job in jobs]
    for system, result in runner.run(once).items() if once else ():
        for row, warm in zip(outcome[system].get("runs", []), result.get("runs", [])):
            if row["status"] == warm["status"] == "ok":
                row["first_step_warm_s"] = warm["first_step_s"]


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
    if one.shapes:
        shape = str(parse_shape(one.shapes[0]).within(CHECK_LENGTH))
        one = one.replace(layers=CHECK_LAYERS, shapes=(shape,), steps=CHECK_STEPS)
    else:
        one = one.replace(steps=max(WARMUP + 1, min(comparison.reference_steps, one.steps)))
    names = list(dict.fromkeys(s.unbudgeted for s in checked))
    if not any(s.engine == "hf" for s in checked):
        names.insert(0, "hf")  # eager's error is the yardstick, even where eager was not timed
    jobs = [one.replace(system=name, gradients=f"{scratch}/{name}.pt") for name in names]
    return [*jobs, one.replace(system=REFERENCE, gradients=f"{scratch}/{REFERENCE}.pt", checkpointing=False)]
