"""Operands of grouped products, and what they are by definition."""

from __future__ import annotations

import torch

from tests.support.ops.checks import tensor


def operands(loads, idle, ranks, transposed, dtype, layout="contiguous", offsets=torch.int64, width=16, columns=8):
    """(x, weight, offsets, a, b, scales, transposed): `idle` rows are nobody's."""
    experts = len(loads)
    x = tensor((sum(loads) + idle, width), "contiguous", dtype)
    weight = tensor((experts, width, columns) if transposed else (experts, columns, width), layout, dtype, 0.3)
    a = [tensor((experts * r, width), "contiguous", dtype, 0.3) for r in ranks]
    b = [tensor((columns, r * experts), "contiguous", dtype, 0.3) for r in ranks]
    ends = torch.tensor(loads).cumsum(0).to(offsets)
    return x, weight, ends, a, b, [0.5 + i for i in range(len(ranks))], transposed


def exact(x, weight, ends, a, b, scales, transposed):
    """Row by row, as PEFT defines the adapters."""
    experts, rows, start = weight.shape[0], [], 0
    for e, end in enumerate(ends.tolist()):
        matrix = weight[e].t() if transposed else weight[e]
        for down, up, scale in zip(a, b, scales):
            matrix = (
                matrix
                + scale * up.reshape(up.shape[0], -1, experts)[:, :, e] @ down.reshape(experts, -1, down.shape[1])[e]
            )
        rows.append(x[start:end] @ matrix.t())
        start = end
    return torch.cat([*rows, x[start:] @ matrix.t() * 0])


def leaves(args):
    x, weight, _, a, b, *_ = args
    return [x, weight, *a, *b]


def wide(args):
    x, weight, ends, a, b, *rest = args

    def widened(t):
        return t.detach().double().requires_grad_()

    return widened(x), widened(weight), ends, [*map(widened, a)], [*map(widened, b)], *rest


def narrow(args):
    x, weight, ends, a, b, *rest = args

    def own(t):
        return t.detach().clone(memory_format=torch.preserve_format).requires_grad_()

    return own(x), own(weight), ends, [*map(own, a)], [*map(own, b)], *rest
