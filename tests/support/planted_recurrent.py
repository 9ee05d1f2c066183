"""Ops that go from token to token as `tests.support.planted` compares them with plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.ops.recurrent import recurrence, selective_operands, selective_recurrence
from tests.support.passes.run import random


def delta_arguments(dtype) -> list:
    """With a state to begin with, so that one chunk has all that several have."""
    shapes = [(1, 3, 1, 2), (1, 3, 1, 2), (1, 3, 2, 3), (1, 3, 2), (1, 3, 2), (1, 2, 2, 3)]
    made = [random(*shape, dtype=dtype) for shape in shapes]
    made[3] = (-made[3].detach().abs()).requires_grad_()
    return made


def channel_arguments(dtype) -> list:
    """The same, with a decay for each channel of the keys, which has all heads."""
    shapes = [(1, 3, 2, 2), (1, 3, 2, 2), (1, 3, 2, 3), (1, 3, 2, 2), (1, 3, 2), (1, 2, 2, 3)]
    made = [random(*shape, dtype=dtype) for shape in shapes]
    made[3] = (-made[3].detach().abs()).requires_grad_()
    return made


def convolved(x, weight, bias):
    made = F.conv1d(x.mT, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
    return F.silu(made[:, :, : x.shape[1]].mT)


#: of three rows that share their first tokens: the token of each place, then first and further places of each token
PLACES = torch.tensor([0, 1, 2, 0, 1, 3, 0])
OWN, AGAIN = torch.tensor([[0, 1, 2, 5], [0, 1, -1, -1]]), torch.tensor([[3, 4], [6, -1]])

#: name of a subject -> file below ops/recurrent, op, the same in plain torch, the call of the op, its arguments in a dtype
RECURRENT_CASES = {
    "delta rule": (
        "gated_delta_rule",
        "gated_delta_rule",
        lambda *args: recurrence(*args, None, 0.7, 1e-3),
        lambda op, *args: op(*args, None, 0.7, 1e-3),
        delta_arguments,
    ),
    "delta rule by channels": (
        "channel_delta_rule",
        "channel_delta_rule",
        lambda *args: recurrence(*args, None, 0.7, 1e-3),
        lambda op, *args: op(*args, None, 0.7, 1e-3),
        channel_arguments,
    ),
    "state space": (
        "ssd_scan",
        "ssd_scan",
        lambda *args: recurrence(*args, None, 1.0, 0.0, delta=False),
        lambda op, *args: op(*args, None),
        delta_arguments,
    ),
    "selective scan": (
        "selective_scan",
        "selective_scan",
        lambda *args: selective_recurrence(*args, None),
        lambda op, *args: op(*args, None),
        lambda dtype: selective_operands(1, 3, 2, 2, True, dtype),
    ),
    "short convolution": (
        "short_convolution",
        "short_convolution",
        convolved,
        lambda op, x, weight, bias: op(x, weight, bias, None, True),
        lambda dtype: [random(2, 5, 3, dtype=dtype), random(3, 4, dtype=dtype), random(3, dtype=dtype)],
    ),
    "convolution of documents": (
        "short_convolution",
        "short_convolution",
        lambda x, weight, bias: torch.cat([convolved(x[:, :2], weight, bias), convolved(x[:, 2:], weight, bias)], 1),
        lambda op, x, weight, bias: op(x, weight, bias, torch.tensor([0, 2, 5]), True),
        lambda dtype: [random(1, 5, 3, dtype=dtype), random(3, 4, dtype=dtype), random(3, dtype=dtype)],
    ),
    "rows of a forest": (
        "branches",
        "branch_rows",
        lambda x: x[:, PLACES],
        lambda op, x: op(x, PLACES, OWN, AGAIN),
        lambda dtype: [random(1, 4, 3, dtype=dtype)],
    ),
    "first copies": (
        "branches",
        "first_copies",
        lambda made: made[:, OWN[0]],
        lambda op, made: op(made, PLACES, OWN),
        lambda dtype: [random(1, 7, 3, dtype=dtype)],
    ),
}
