"""Rotary embedding as Llama spells it."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.passes.run import family

PASSES = family("rope")
H = 4


def tables(length=5, dim=8, dtype=torch.float32, rows=1, grad=False):
    angles = torch.rand(rows, length, dim // 2) * 6
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype).requires_grad_(grad), angles.sin().to(dtype).requires_grad_(grad)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class Heads(nn.Module):
    """Queries and keys of projections, turned by a function of both and of the tables."""

    def __init__(self, turn):
        super().__init__()
        self.q, self.k, self.turn = nn.Linear(6, 32), nn.Linear(6, 16), turn

    def forward(self, x, cos, sin):
        q, k = (layer(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for layer in (self.q, self.k))
        return self.turn(q, k, cos, sin)


def turned(half):
    return lambda x, c, s: x * c + half(x) * s
