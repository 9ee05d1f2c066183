"""One system on several GPUs: a process a GPU, all started by torchrun, that make one row of figures."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from tunecompile.cli.compare.spec import Job

LARGEST = (
    "peak_gib",
    "peak_reserved_gib",
    "first_step_s",
    "host_ms_per_step",
)  # figures of which the worst rank's counts


def command(job: Job) -> list[str]:
    """What runs a module of Python in as many processes as the job asks for."""
    if job.processes == 1:
        return [sys.executable, "-m"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes), "-m"]


def rank() -> int:
    return int(os.environ.get("RANK", 0))


@contextlib.contextmanager
def group(job: Job) -> Iterator[None]:
    """Each process has a GPU of its own, and they know each other, unless each is to be alone."""
    if job.processes == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if job.parallel != "alone":
        dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    yield
    if dist.is_initialized():  # not after what failed: the other ranks would be waited for
        dist.destroy_process_group()


def together(figures: dict, job: Job) -> dict:
    """Of all ranks: tokens/s in sum at the slowest one's pace, losses in the mean, memory of the fullest. All ranks call it, and all get it."""
    if job.processes == 1:
        return figures
    import torch.distributed as dist

    if job.parallel == "alone" and not dist.is_initialized():
        dist.init_process_group("gloo")  # now that the training is over
    every: list = [None] * job.processes
    dist.all_gather_object(every, figures)
    slowest = max(every, key=lambda own: own["step_ms"]["median"])
    tokens = sum(own["tokens_per_s"] * own["step_ms"]["median"] for own in every)
    return (
        slowest
        | {name: max(own[name] for own in every) for name in LARGEST if slowest.get(name) is not None}
        | {
            "tokens_per_s": tokens / slowest["step_ms"]["median"],
            "losses": [sum(step) / job.processes for step in zip(*(own["losses"] for own in every))],
        }
    )
