"""What runs of a trainer have in common: settings, and the numbers that are logged."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.support.matrix.cells import DEVICE, lora

Numbers = dict[str, float]


Outcome = tuple[Numbers, nn.Module]


CLOCKS = "runtime", "per_second", "time"  #: parts of the names of what no two runs share


SETTINGS = dict(
    optim="sgd",
    learning_rate=0.5,
    max_steps=3,
    eval_strategy="no",
    use_cpu=DEVICE == "cpu",
    bf16=False,
    dataloader_num_workers=0,
)  #: what SGD has changed is the sum of the gradients


def logged(trainer: Any) -> Numbers:
    """All numbers of its log: losses, norms, and metrics as entropy and token accuracy."""
    return {
        f"{key}, entry {i}": value
        for i, entry in enumerate(trainer.state.log_history)
        for key, value in entry.items()
        if not any(clock in key for clock in CLOCKS)
    }


def adapted() -> nn.Module:
    return lora(target_modules=["q_proj", "down_proj"])()
