"""One system on several GPUs: torchrun starts a process for each, and their figures become one row."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from tunecompile.cli.compare.spec import Job

LARGEST = ("peak_gib", "peak_reserved_gib", "first_step_s", "host_ms_per_step")  # the largest of all ranks counts


def command(job: Job) -> list[str]:
    """The command that runs a Python module in as many processes as the job requires."""
    if job.processes == 1:
        return [sys.executable, "-m"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes), "-m"]


def rank() -> int:
    """The rank of this process."""
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def group(job: Job) -> Iterator[None]:
    """Set this process's GPU, and make the process group unless each trains alone."""
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
    if dist.is_initialized():  # not after an error, as it would wait for the other ranks
        dist.destroy_process_group()


def together(figures: dict, job: Job) -> dict:
    """The figures of all ranks as one, on every rank. All ranks have to call it.

    Tokens/s is the sum at the pace of the slowest rank, losses are means, and memory is that of the fullest GPU.
    """
    if job.processes == 1:
        return figures
    import torch.distributed as dist

    if job.parallel == "alone" and not dist.is_initialized():
        dist.init_process_group("gloo")  # the training is over
    every: list = [None] * job.processes
    dist.all_gather_object(every, figures)
    slowest = max(every, key=lambda one: one["step_ms"]["median"])
    tokens = sum(one["tokens_per_s"] * one["step_ms"]["median"] for one in every)
    return (
        slowest
        | {name: max(one[name] for one in every) for name in LARGEST if slowest.get(name) is not None}
        | {
            "tokens_per_s": tokens / slowest["step_ms"]["median"],
            "losses": [sum(step) / job.processes for step in zip(*(one["losses"] for one in every))],
        }
    )
