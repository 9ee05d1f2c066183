"""One system in its own process: `python -m tunecompile.cli.compare.worker job.json result.json`.

Events for its parent are lines that begin with `@`; all other output is for the log. What the process does is in
`tasks`, which is imported after Unsloth.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path

from tunecompile.cli.compare import ranks
from tunecompile.cli.compare.progress import Progress, say, wait_to_go
from tunecompile.cli.compare.spec import Job


def prepare_process(job: Job) -> None:
    """Import what the job needs, Unsloth before torch and transformers; a process that waits has that behind it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    if job.engine == "unsloth":
        import unsloth  # noqa: F401
    with contextlib.suppress(Exception):  # the job raises it once more, as the status of its row
        import_packages(job)


def import_packages(job: Job) -> None:
    """Import the packages of a system, and its model's code."""
    from tunecompile.cli.compare import models
    from tunecompile.estimate.known_shapes import empty_model, shape_config

    packages = ["peft"] * (job.mode != "full") + ["bitsandbytes"] * (job.mode == "qlora")
    engines = {"tunecompile": ["tunecompile.api"], "liger": ["liger_kernel.transformers"]}
    for package in packages + engines.get(job.engine, []):
        importlib.import_module(package)
    if job.engine != "unsloth" and models.is_shape(job.model):
        empty_model(shape_config(job.model, job.layers))


def main(job_path: str, result_path: str) -> None:
    """Run the job of a file, and write its result to another file."""
    spec = json.loads(Path(job_path).read_text())
    task = spec.pop("task", "train")
    job = Job(**spec)
    progress = Progress(Path(result_path) if ranks.rank() == 0 else None)
    with progress.on("import"):
        prepare_process(job)
        from tunecompile.cli.compare import tasks

    wait_to_go()
    say("phase", text="loading")
    started = time.perf_counter()
    with ranks.group(job):
        result = tasks.guarded(lambda: tasks.run_task(task, job, progress))
        failed = any(row.get("status", "ok") != "ok" for row in (result, *result.get("runs", [])))
        if ranks.rank() == 0 or failed:
            progress.path = Path(result_path)
            progress.write(result | {"seconds": time.perf_counter() - started})
        if failed and job.processes > 1:
            os._exit(1)  # torchrun ends the other ranks, which wait for this one


if __name__ == "__main__":
    main(*sys.argv[1:3])
