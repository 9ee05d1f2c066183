"""Layers of torch alone, and their training beside eager's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo


class NormedMLP(nn.Module):
    """A norm and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.weight, self.gate, self.up = nn.Parameter(torch.ones(16)), nn.Linear(16, 32), nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        h = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model.train()(torch.linspace(-1, 1, 3 * 16).reshape(3, 16)).backward()
    return [p.grad.clone() for p in model.parameters()]


def trained(**options) -> nn.Module:
    """Optimized, and trained for one step as it would have been."""
    torch._dynamo.reset()
    model = zoo.Stack(NormedMLP)
    expected = gradients(model)
    tunecompile.optimize(model, executor="eager", **options)
    for ours, eager in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, eager)
    return model
