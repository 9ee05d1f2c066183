"""A training under torchrun of which one rank runs out of memory in its second step, and whose loop leaves out steps that do."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import tunecompile
from tests.support.memory.full_device import FULL, Tiny, loss


def full(*_):
    raise torch.OutOfMemoryError(FULL)


def main():
    dist.init_process_group("gloo")
    made = Tiny().train()
    for layer in made.backbone.layers:
        fully_shard(layer)
    tunecompile.optimize(fully_shard(made), memory="1GiB", executor="eager")
    for step in range(3):
        if step == 1 and os.environ["RANK"] == "1":
            made.backbone.norm.register_forward_hook(full)  # what is between layers is not repeated
        try:
            loss(made).backward()
        except torch.OutOfMemoryError:
            continue
    print("trained")


if __name__ == "__main__":
    main()
