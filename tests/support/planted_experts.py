"""Ops of experts as `tests.support.planted` compares them with plain torch."""

from __future__ import annotations

import torch

from tests.support.passes.run import random

ENDS, EXPERTS, RANK, WIDE = (2, 2, 5), 3, 2, 4  #: of six rows: an expert without any, and a row of nobody
ORDER = torch.tensor([3, 0, 5, 1, 4, 2])
PLACES = torch.argsort(ORDER)


def of_expert(weight, a, b, expert):
    up = b.reshape(len(b), RANK, EXPERTS)[:, :, expert]
    return weight[expert] + 0.5 * up @ a[expert * RANK : (expert + 1) * RANK]


def by_expert(x, weight, a, b):
    rows = [x[begin:end] @ of_expert(weight, a, b, e).t() for e, (begin, end) in enumerate(zip((0, *ENDS), ENDS))]
    return torch.cat([*rows, x.new_zeros(len(x) - ENDS[-1], len(b))])


def expert_arguments(dtype) -> list:
    shapes = [(EXPERTS, 5, WIDE), (EXPERTS * RANK, WIDE), (5, RANK * EXPERTS)]
    return [random(6, WIDE, dtype=dtype), *(random(*shape, dtype=dtype) for shape in shapes)]


#: name of a subject -> file below ops/experts, op, the same in plain torch, the call of the op, its arguments in a dtype
EXPERT_CASES = {
    "experts": (
        "grouped_linear",
        "grouped_lora_linear",
        by_expert,
        lambda op, x, w, a, b: op(x, w, torch.tensor(ENDS, dtype=torch.int32), [a], [b], [0.5], False, None)[0],
        expert_arguments,
    ),
    "experts' biases": (
        "grouped_linear",
        "grouped_lora_linear",
        lambda x, w, a, b, bias: by_expert(x, w, a, b) + torch.cat([bias[[0, 0, 2, 2, 2]], bias.new_zeros(1, 5)]),
        lambda op, x, w, a, b, bias: op(x, w, torch.tensor(ENDS, dtype=torch.int32), [a], [b], [0.5], False, bias)[0],
        lambda dtype: [*expert_arguments(dtype), random(EXPERTS, 5, dtype=dtype)],
    ),
    "experts' weights": (
        "adapted_stack",
        "adapted_stack",
        lambda w, a, b: torch.stack([of_expert(w, a, b, expert) for expert in range(EXPERTS)]),
        lambda op, w, a, b: op(w, [a], [b], [0.5], False),
        lambda dtype: expert_arguments(dtype)[1:],
    ),
    "rows to experts": (
        "rows",
        "spread_rows",
        lambda x: x[ORDER // 2],
        lambda op, x: op(x, ORDER, PLACES, 2),
        lambda dtype: [random(3, 4, dtype=dtype)],
    ),
    "rows of experts": (
        "rows",
        "collect_rows",
        lambda y: y[PLACES].unflatten(0, (3, 2)).sum(1),
        lambda op, y: op(y, ORDER, PLACES, 2),
        lambda dtype: [random(6, 4, dtype=dtype)],
    ),
}
