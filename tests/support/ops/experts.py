"""Operands of grouped products, and what they are by definition."""

from __future__ import annotations

import torch

from tests.support.ops.checks import tensor


def operands(
    loads, idle, ranks, transposed, dtype, layout="contiguous", offsets=torch.int64, width=16, columns=8, biased=False
):
    """(x, weight, offsets, a, b, scales, transposed, bias): `idle` rows are nobody's."""
    experts = len(loads)
    x = tensor((sum(loads) + idle, width), "contiguous", dtype)
    weight = tensor((experts, width, columns) if transposed else (experts, columns, width), layout, dtype, 0.3)
    a = [tensor((experts * r, width), "contiguous", dtype, 0.3) for r in ranks]
    b = [tensor((columns, r * experts), "contiguous", dtype, 0.3) for r in ranks]
    ends = torch.tensor(loads).cumsum(0).to(offsets)
    bias = tensor((experts, columns), layout, dtype) if biased else None
    return x, weight, ends, a, b, [0.5 + i for i in range(len(ranks))], transposed, bias


def exact(x, weight, ends, a, b, scales, transposed, bias=None):
    """Row by row, as PEFT defines the adapters."""
    experts, rows, start = weight.shape[0], [], 0
    for e, end in enumerate(ends.tolist()):
        matrix = weight[e].t() if transposed else weight[e]
        for down, up, scale in zip(a, b, scales):
            matrix = (
                matrix
                + scale * up.reshape(up.shape[0], -1, experts)[:, :, e] @ down.reshape(experts, -1, down.shape[1])[e]
            )
        rows.append(x[start:end] @ matrix.t() + (0 if bias is None else bias[e]))
        start = end
    return torch.cat([*rows, x[start:] @ matrix.t() * 0])


def leaves(args):
    x, weight, _, a, b, _, _, bias = args
    return [x, weight, *a, *b, *([] if bias is None else [bias])]


def wide(args):
    return _each(args, lambda t: t.detach().double().requires_grad_())


def narrow(args):
    return _each(args, lambda t: t.detach().clone(memory_format=torch.preserve_format).requires_grad_())


def _each(args, made):
    x, weight, ends, a, b, scales, transposed, bias = args
    last = None if bias is None else made(bias)
    return made(x), made(weight), ends, [*map(made, a)], [*map(made, b)], scales, transposed, last
