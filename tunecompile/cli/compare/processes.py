"""Workers as child processes: one after the other, or taking turns step by step.

Where memory allows it (on a CPU), all systems are alive at once and only one of them runs at a time, a step each. What
else the machine does then falls on all of them alike, and the ratio of their medians means something.
"""

from __future__ import annotations

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
    """A child process and what it has said so far."""

    job: Job
    folder: Path
    listen: Listener
    turns: bool
    task: str = "train"
    caches: str | None = None  #: the compiler's, kept; None: empty ones of its own
    process: subprocess.Popen | None = field(default=None, init=False)

    @property
    def stem(self) -> str:
        return (
            f"{self.job.system}-{self.task}"
            + (f"-{self.job.layers}-layers" if self.job.layers else "")
            + ("-warm" if self.job.steps == 1 else "")
            + (f"-repeat-{self.job.repeat}" if self.job.repeat else "")
        )

    def start(self) -> None:
        spec = self.folder / f"{self.stem}.job.json"
        self.result = self.folder / f"{self.stem}.result.json"
        self.log = open(self.folder / f"{self.stem}.log", "w", encoding="utf-8")  # noqa: SIM115: closed in finish
        self.own_caches = tempfile.mkdtemp(prefix="tunecompile-cache-")
        spec.write_text(json.dumps(self.job.to_dict() | {"task": self.task}))
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        if self.turns:
            environment["TUNECOMPILE_TURNS"] = "1"
        if not self.job.trust_cache:  # compile times are those of a first run
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
        """Let it run until it hands over or ends. True while it lives."""
        if self.turns:
            try:
                self.process.stdin.write("go\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended; its last lines are still to be read
        for line in self.process.stdout:
            event = self.hear(line)
            if event == "turn":
                return True
        self.finish()
        return False

    def hear(self, line: str) -> str | None:
        name, _, fields = line.rstrip("\n").partition(" ")
        if not name.startswith("@"):
            self.log.write(line)
            return None
        self.listen(self.job.system, name[1:], json.loads(fields or "{}"))
        return name[1:]

    def finish(self) -> None:
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.own_caches, ignore_errors=True)

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.finish()

    def read_result(self) -> dict:
        if self.result.is_file():
            return json.loads(self.result.read_text())
        code = self.process.returncode
        reason = f"killed by signal {-code}, often for memory" if code < 0 else f"exit code {code}"
        return {"status": f"error: the process ended early ({reason}); see {self.log.name}"}


def run_workers(workers: list[Worker], at_once: bool = False) -> list[dict]:
    """Run all of them; with turns a step each in rotation, otherwise each to its end, one after the other or at once."""
    groups = [workers] if at_once or (workers and workers[0].turns) else [[worker] for worker in workers]
    try:
        for group in groups:
            for worker in group:
                worker.start()
            alive = list(group)
            for worker in alive:
                if worker.turns:  # the greeting before the first turn
                    wait_until_ready(worker)
            while alive:
                alive = [worker for worker in alive if worker.run_turn()]
    finally:
        for worker in workers:
            worker.stop()
    return [worker.read_result() for worker in workers]


def wait_until_ready(worker: Worker) -> None:
    for line in worker.process.stdout:
        if worker.hear(line) == "turn":
            return
