"""Workers as child processes that run one after the other, or alternate step by step.

If memory permits (on a CPU), the processes of all systems exist at once and run one step in turn. Other load on the
machine then affects all of them alike, so the ratio of their medians is meaningful.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tunecompile.cli.compare import ranks
from tunecompile.cli.compare.spec import Job

Listener = Callable[[str, str, dict], None]  # system, event, fields


@dataclass
class Worker:
    """A child process that runs one job."""

    job: Job
    folder: Path
    listen: Listener
    turns: bool
    task: str = "train"
    caches: str | None = None  #: folder of the compilers' caches, which is kept; None: a new one
    process: subprocess.Popen | None = field(default=None, init=False)

    @property
    def started(self) -> subprocess.Popen:
        """The process, which `start` has started."""
        assert self.process is not None
        return self.process

    @property
    def stem(self) -> str:
        """The name of its files, without a suffix."""
        return (
            f"{self.job.system}-{self.task}"
            + (f"-{self.job.layers}-layers" if self.job.layers else "")
            + ("-warm" if self.job.steps == 1 else "")
            + (f"-repeat-{self.job.repeat}" if self.job.repeat else "")
        )

    def start(self) -> None:
        """Write the job and start the process."""
        spec = self.folder / f"{self.stem}.job.json"
        self.result = self.folder / f"{self.stem}.result.json"
        self.log = open(self.folder / f"{self.stem}.log", "w", encoding="utf-8")  # noqa: SIM115 (`finish` closes it)
        self.own_caches = tempfile.mkdtemp(prefix="tunecompile-cache-")
        spec.write_text(json.dumps(self.job.to_dict() | {"task": self.task}))
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        if self.turns:
            environment["TUNECOMPILE_TURNS"] = "1"
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

    def run_turn(self) -> bool:
        """Let it run until it waits for its next turn (True) or ends (False)."""
        process = self.started
        if self.turns and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended; its last lines are read below
                process.stdin.write("go\n")
                process.stdin.flush()
        for line in process.stdout or ():
            event = self.hear(line)
            if event == "turn":
                return True
        self.finish()
        return False

    def hear(self, line: str) -> str | None:
        """Pass an event on and return its name; log any other line."""
        name, _, fields = line.rstrip("\n").partition(" ")
        if not name.startswith("@"):
            self.log.write(line)
            return None
        self.listen(self.job.system, name[1:], json.loads(fields or "{}"))
        return name[1:]

    def finish(self) -> None:
        """Wait for its end and clean up."""
        self.started.wait()
        self.log.close()
        shutil.rmtree(self.own_caches, ignore_errors=True)

    def stop(self) -> None:
        """Kill it if it runs."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.finish()

    def read_result(self) -> dict:
        """The result that it wrote, or its status if it ended early."""
        if self.result.is_file():
            return json.loads(self.result.read_text())
        code = self.started.returncode
        reason = f"killed by signal {-code}, often for memory" if code < 0 else f"exit code {code}"
        return {"status": f"error: the process ended early ({reason}); see {self.log.name}"}


def run_workers(
    workers: list[Worker], at_once: bool = False, ended: Callable[[list[dict]], None] | None = None
) -> list[dict]:
    """Run all workers and return their results: in turns, all at once, or one after the other.

    Args:
        workers: of one comparison.
        at_once: run them at the same time.
        ended: called with the results so far whenever workers have ended and others follow.
    """
    groups = [workers] if at_once or (workers and workers[0].turns) else [[worker] for worker in workers]
    results: list[dict] = []
    try:
        for group in groups:
            for worker in group:
                worker.start()
            alive = list(group)
            for worker in alive:
                if worker.turns:  # it waits for its first turn
                    wait_until_ready(worker)
            while alive:
                alive = [worker for worker in alive if worker.run_turn()]
            results += [worker.read_result() for worker in group]
            if ended is not None and len(results) < len(workers):
                ended(results)
    finally:
        for worker in workers:
            worker.stop()
    return results


def wait_until_ready(worker: Worker) -> None:
    """Read the worker's output until it waits for its first turn."""
    for line in worker.started.stdout or ():
        if worker.hear(line) == "turn":
            return
