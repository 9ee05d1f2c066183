"""Workers as child processes that run one after the other, alternate step by step, or run at the same time.

A worker imports its packages and waits until its parent lets it go; workers that alternate wait before each step, too.
If memory permits (on a CPU), the processes of all systems exist at once and run one step in turn. Other load on the
machine then affects all of them alike, so the ratio of their medians is meaningful.

On a GPU they run one after the other, but may all be started ahead, so that they import at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tunecompile.cli.compare import ranks
from tunecompile.cli.compare.spec import Job

Listener = Callable[[str, str, dict], None]  # system, event, fields
LEFT_OUT = "left out: no time was left"  #: the status of what does not fit into the seconds of a comparison
LEAST_S = 10.0  #: seconds, below which no worker is begun


@dataclass
class Worker:
    """A child process that runs one job."""

    job: Job
    folder: Path
    listen: Listener
    turns: bool  #: wait before each step
    task: str = "train"
    caches: str | None = None  #: folder of the compilers' caches, which is kept; None: a new one
    process: subprocess.Popen | None = field(default=None, init=False)
    overdue: bool = field(default=False, init=False)
    kept: Callable[[], None] | None = field(default=None, init=False)  #: called when it has written a part

    @property
    def stem(self) -> str:
        """The name of its files, without a suffix."""
        return (
            f"{self.job.system}-{self.task}"
            + (f"-{self.job.layers}-layers" if self.job.layers else "")
            + ("-warm" if self.job.steps == 1 else "")
            + (f"-repeat-{self.job.repeat}" if self.job.repeat else "")
            + ("-check" if self.job.shapes and self.job.gradients else "")
        )

    def start(self) -> None:
        """Write the job and start the process, if it is not running."""
        if self.process is not None:
            return
        spec = self.folder / f"{self.stem}.job.json"
        self.result = self.folder / f"{self.stem}.result.json"
        self.result.unlink(missing_ok=True)  # an earlier run's, in the same folder
        self.log = open(self.folder / f"{self.stem}.log", "w", encoding="utf-8")  # noqa: SIM115 (`finish` closes it)
        self.own_caches = tempfile.mkdtemp(prefix="tunecompile-cache-")
        spec.write_text(json.dumps(self.job.to_dict() | {"task": self.task}))
        environment = dict(os.environ, PYTHONUNBUFFERED="1", TUNECOMPILE_TURNS="1" if self.turns else "")
        if not self.job.trust_cache:  # with empty caches, compile times are those of a first run
            folder = self.caches or self.own_caches
            environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        self.process = subprocess.Popen(
            [*ranks.command(self.job), "tunecompile.cli.compare.worker", str(spec), str(self.result)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )

    def go(self) -> bool:
        """Let it continue; True."""
        stdin = self.process and self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended; its last lines are still to be read
            if stdin:
                stdin.write("go\n")
                stdin.flush()
        return True

    def waits(self) -> bool:
        """Read its output until it waits for its turn (True) or ends (False). What is no event is only logged."""
        for line in (self.process and self.process.stdout) or ():
            name, _, fields = line.rstrip("\n").partition(" ")
            if not name.startswith("@"):
                self.log.write(line)
                continue
            self.listen(self.job.system, name[1:], json.loads(fields or "{}"))
            if name == "@turn":
                return True
            if name == "@kept" and self.kept is not None:
                self.kept()
        self.finish()
        return False

    def finish(self) -> None:
        """Wait for its end and clean up."""
        assert self.process is not None
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.own_caches, ignore_errors=True)

    def stop(self) -> None:
        """Kill it if it runs."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.finish()

    def stop_late(self) -> None:
        """Kill it because the seconds are over."""
        self.overdue = True
        if self.process and self.process.poll() is None:
            self.process.kill()

    def read_result(self) -> dict:
        """The result that it wrote; where it ended early, the runs that it wrote, and its status for the others."""
        result = self.read_part()
        if "seconds" in result:  # which only a whole one has
            return result
        code = self.process.returncode if self.process else 0
        reason = f"killed by signal {-code}, often for memory" if code < 0 else f"exit code {code}"
        status = LEFT_OUT if self.overdue else f"error: the process ended early ({reason}); see {self.log.name}"
        there = result.get("runs", [])
        shapes = [shape for shape in self.job.shapes if shape not in {run["shape"] for run in there}]
        lost = [{"shape": shape, "seed": self.job.draw, "status": status} for shape in shapes]
        return result | ({"runs": [*there, *lost]} if there else {"status": status})

    def read_part(self) -> dict:
        """What it has written so far."""
        return json.loads(self.result.read_text()) if self.result.is_file() else {}


def run_workers(
    workers: list[Worker],
    at_once: bool = False,
    ended: Callable[[list[dict]], None] | None = None,
    deadline: float | None = None,
) -> list[dict]:
    """Run all workers and return their results: in turns, all at once, or one after the other.

    Args:
        workers: of one comparison; some may have been started ahead.
        at_once: run them at the same time.
        ended: called with the results so far whenever workers have ended or written a part, and others follow.
        deadline: of `time.monotonic`, at which what runs is ended, and what would follow is left out.
    """
    groups = [workers] if at_once or (workers and workers[0].turns) else [[worker] for worker in workers]
    results: list[dict] = []
    try:
        for group in groups:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left < LEAST_S:
                results += [{"status": LEFT_OUT}] * len(group)
                continue
            if ended is not None and len(group) == 1:
                group[0].kept = partial(hand_on_part, ended, tuple(results), group[0])
            with ended_after(left, group):
                run_group(group)
            results += [worker.read_result() for worker in group]
            if ended is not None and len(results) < len(workers):
                ended(results)
    finally:
        for worker in workers:
            worker.stop()
    return results


def hand_on_part(ended: Callable[[list[dict]], None], results: Sequence[dict], worker: Worker) -> None:
    """Hand on the results so far with the part that a worker has written."""
    ended([*results, worker.read_part()])


def run_group(group: Sequence[Worker]) -> None:
    """Run workers at the same time, or in turns."""
    for worker in group:
        worker.start()
    alive = [worker for worker in group if worker.waits()]
    for worker in alive:
        if not worker.turns:
            worker.go()
    while alive:
        alive = [worker for worker in alive if (not worker.turns or worker.go()) and worker.waits()]


@contextlib.contextmanager
def ended_after(seconds: float | None, group: Sequence[Worker]) -> Iterator[None]:
    """End workers that still run after so many seconds; None: never."""
    timer = threading.Timer(seconds or 0.0, lambda: [worker.stop_late() for worker in group])
    if seconds is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
