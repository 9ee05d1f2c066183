"""One system on several GPUs: a process a GPU, all started by torchrun, under the engine that was asked for."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from tunecompile.compare.spec import Job

ENGINES = ("ddp", "fsdp2")
LARGEST = ("peak_gib", "peak_reserved_gib", "first_step_s", "host_ms_per_step")  # figures of which the worst rank's counts


def command(job: Job) -> list[str]:
    """What runs a module of Python in as many processes as the job asks for."""
    if job.gpus == 1:
        return [sys.executable, "-m"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.gpus), "-m"]


def rank() -> int:
    return int(os.environ.get("RANK", 0))


@contextlib.contextmanager
def group(job: Job) -> Iterator[None]:
    """The processes know each other, and each has a GPU of its own."""
    if job.gpus == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    yield
    if dist.is_initialized():  # not after what failed: the other ranks would be waited for
        dist.destroy_process_group()


def shard(model, job: Job):
    """FSDP2's layers, one a unit, before the system's own call."""
    if job.gpus == 1 or job.parallel != "fsdp2":
        return model
    from torch.distributed.fsdp import fully_shard

    from tunecompile.layers import find_layers

    for stack in find_layers(model):
        for layer in stack.members:
            fully_shard(layer)
    return fully_shard(model)


def replicate(model, job: Job):
    """DDP's wrapper, after it."""
    if job.gpus == 1 or job.parallel != "ddp":
        return model
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def together(figures: dict, job: Job) -> dict:
    """Of all ranks: tokens/s in sum at the slowest one's pace, losses in the mean, memory of the fullest. All ranks call it, and all get it."""
    if job.gpus == 1:
        return figures
    import torch.distributed as dist

    every: list = [None] * job.gpus
    dist.all_gather_object(every, figures)
    slowest = max(every, key=lambda own: own["step_ms"]["median"])
    tokens = sum(own["tokens_per_s"] * own["step_ms"]["median"] for own in every)
    return slowest | {name: max(own[name] for own in every) for name in LARGEST if slowest.get(name) is not None} | {
        "tokens_per_s": tokens / slowest["step_ms"]["median"], "losses": [sum(step) / job.gpus for step in zip(*(own["losses"] for own in every))]}
