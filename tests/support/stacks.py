"""Loops over an optimized model whose layers are replayed together, beside the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.support import zoo
from tunecompile.runtime.cuda_graphs.recorded_chains import RecordedChains
from tunecompile.runtime.model_state import state_of


class TakesOne(nn.Module):
    """A layer that is given hidden states, and a value beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(hidden + own).sin()


def layers_of(model: nn.Module) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("layers"))


def once(m: nn.Module, **batch) -> None:
    m(**zoo.batch(**batch)).loss.backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(models: Sequence[nn.Module], run: Callable = once) -> None:
    """Both have the same gradients."""
    found = []
    for m in models:
        m.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        run(m)
        found.append(gradients(m))
    assert found[0].keys() == found[1].keys() and max(zoo.errors(*found).values()) < 1e-4


def of(model: nn.Module) -> RecordedChains:
    return state_of(model).replays.stacks.chains


def recorded(model: nn.Module) -> int:
    return of(model).recorded


def warm(models: Sequence[nn.Module], steps: int = 6, **batch) -> None:
    """Until their stack is recorded."""
    for seed in range(steps):
        same(models, lambda m: once(m, seed=seed, **batch))
