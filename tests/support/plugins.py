"""Packages of passes that are made up by a test: their entry points, and a model that trains under them."""

from __future__ import annotations

import uuid

import torch
import torch.nn.functional as F
from torch import nn

import tunecompile


def fresh() -> str:
    """A line of source that no run had before: code out of Inductor's caches would have met no plan and no lower pass."""
    return f"\n# {uuid.uuid4()}\n"


HEADER = """
import torch, torch.nn.functional as F
from torch import Tensor
from tunecompile import Cost, Pass, op, recognize, rewrite

def nothing(graph, context):
    context.notes.append(f"{__name__} ran")

"""


class TwoLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)) * self.up(x))


def step_of(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(3, 8)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def trained_as_before(**options) -> tunecompile.api.Report:
    """Of a model whose gradients, optimized, are those it had."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(TwoLinears() for _ in range(3))))
    expected = step_of(model)
    tunecompile.optimize(model, **{"executor": "eager", **options})
    for _ in range(2):
        torch.testing.assert_close(step_of(model), expected)
    return tunecompile.report(model)
