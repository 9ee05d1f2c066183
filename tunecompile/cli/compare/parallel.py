"""Engines for several GPUs, by name (`spec.PARALLEL`): how each wraps a model, and how its loop takes a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.cli.compare.spec import Job
from tunecompile.runtime.layers.find_layers import find_layers


def shard(model: nn.Module, job: Job) -> nn.Module:
    """Shard the layers with FSDP2, each as one unit, before the system is applied."""
    if job.parallel != "fsdp2" or job.processes == 1:
        return model
    from torch.distributed.fsdp import fully_shard

    for stack in find_layers(model):
        for layer in stack.members:
            fully_shard(layer)
    return fully_shard(model)


def wrap(model: nn.Module, job: Job) -> nn.Module:
    """Wrap the model in DDP or DeepSpeed's engine, after the system is applied."""
    if job.processes == 1 or job.parallel not in ("ddp", "zero3"):
        return model
    if job.parallel == "zero3":
        return zero(model, job)
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def zero(model: nn.Module, job: Job) -> nn.Module:
    """ZeRO-3 with DeepSpeed's default settings.

    The optimizer is torch's, as with the other engines; in bf16 its copy of the weights is in fp32.
    """
    if job.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": job.dtype == "bfloat16"},
    }
    deepspeed.init_distributed("nccl" if job.device == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed.initialize(model=model, optimizer=adamw(model, job), config=config)[0]


def adamw(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """Torch's fused AdamW for the trained parameters."""
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=job.lr, weight_decay=0.0, fused=True
    )


@dataclass(frozen=True)
class Stepper:
    """How a loop takes a step: by torch's functions or those of DeepSpeed's engine."""

    backward: Callable[[Tensor], object]
    step: Callable[[], object]  # the optimizer's step, after which there are no gradients

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Stepper:
        """By torch's functions."""
        return cls(Tensor.backward, lambda: (optimizer.step(), optimizer.zero_grad(set_to_none=True)))


def stepper(model: Any, job: Job) -> Stepper:
    """The stepper of a wrapped model."""
    if job.parallel == "zero3" and job.processes > 1:
        return Stepper(model.backward, model.step)
    return Stepper.of(adamw(model, job))
