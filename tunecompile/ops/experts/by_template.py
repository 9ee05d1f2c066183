"""Grouped products by a template, which adds the adapters' term before rounding and may read rows by an index."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tunecompile import templates
from tunecompile._torch.card import AMPERE, capability, older_than
from tunecompile.ir.op import refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.experts.adapted_stack import downs, padded_rank, split_downs, split_ups, ups
from tunecompile.ops.experts.products import BY_TORCH, LOOPED, bias_gradient, refuse_grouped
from tunecompile.ops.experts.rows import spread

WIDEST = 256  #: the largest rank of all adapters together for which their gradients fit in registers


def refuse(x: Tensor, weight: Tensor, offsets: Tensor, a: Sequence[Tensor]) -> Note | None:
    """Why the template cannot take rows and a stack like these, or None."""
    if reason := refuse_gpu(x, weight):
        return reason
    if x.dtype != weight.dtype:
        return note("dtypes-differ", "rows and the stack of weights")
    if not weight.is_contiguous():
        return note("not-contiguous", "stacks of weights are")
    if a and padded_rank(a, weight.shape[0]) > WIDEST:
        return note("rank-too-large", rank=padded_rank(a, weight.shape[0]), limit=WIDEST)
    if older_than(x.device, AMPERE):
        return note("gpu-before-ampere")
    return None


def refuse_plain(x: Tensor, weight: Tensor, offsets: Tensor, a: Sequence[Tensor], bias: Tensor | None) -> Note | None:
    """As `refuse`; also if nothing is added and no row is gathered, where torch's products are faster."""
    if reason := refuse(x, weight, offsets, a):
        return reason
    fast = (capability(x.device) or (0, 0))[0] in (9, 10)
    by_torch = not a and bias is None and fast and refuse_grouped(x, [weight]) is None
    return note("torch-is-faster", "products without adapters") if by_torch else None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def forward(x, weight, offsets, a, b, scales, transposed, bias, *, order=None, choices=0):
    """Return `grouped_lora_linear` of row order[s] // choices of x for each s, or of row s without an order.

    Args:
        x: [S, K]; or with an order [T, K].
        weight, offsets, a, b, scales, transposed, bias: as for `grouped_lora_linear`; `refuse` returns None for them.
        order, choices: a permutation [S] and how many rows a token has; or None and 0.
    """
    x, count = _dense(x), (x if order is None else order).shape[0]
    table = templates.experts.tiles(offsets, count, x)
    read, told = {"order": order, "choices": choices}, {"bias": None if bias is None else bias.contiguous()}
    if not a:
        y = templates.experts.rows(x, weight, offsets, table, count, turned=not transposed, **told, **read)
        return y, x.new_zeros(count, 0)
    down, up = downs(a, weight.shape[0], x.dtype), ups(b, scales, weight.shape[0], x.dtype)
    xa = templates.experts.rows(x, down, offsets, table, count, turned=True, **read)
    y = templates.experts.rows(x, weight, offsets, table, count, turned=not transposed, inner=xa, up=up, **told, **read)
    return y, xa


def backward(
    grad,
    x,
    weight,
    offsets,
    a,
    b,
    scales,
    transposed,
    bias,
    out1,
    *,
    used: Sequence[bool],
    grad_order=None,
    grad_choices=0,
    order=None,
    choices=0,
) -> list[Tensor | None]:
    """Return the gradients of `grouped_lora_linear` for rows that are read by permutations.

    Args:
        grad, x, weight, offsets, a, b, scales, transposed, bias, out1: as for `grouped_lora_linear_backward`.
        used: whether each gradient is read; the others are None.
        grad_order, grad_choices, order, choices: of grad and of x, as for `forward`.
    """
    grad, x = _dense(grad), _dense(x)
    count = (grad if grad_order is None else grad_order).shape[0]
    table = templates.experts.tiles(offsets, count, grad)
    read, told = {"order": grad_order, "choices": grad_choices}, {}
    d_a, d_b = [], []
    if a:
        down, up = downs(a, weight.shape[0], x.dtype), ups(b, scales, weight.shape[0], x.dtype)
        gb = templates.experts.rows(grad, up, offsets, table, count, turned=True, **read)
        told = {"inner": gb, "up": down}
        d_a = split_downs(templates.experts.outer(gb, x, offsets, order=order, choices=choices), a)
        d_b = split_ups(templates.experts.outer(out1.contiguous(), grad, offsets, **read), b, scales)
    d_x = d_weight = None
    if used[0]:
        d_x = templates.experts.rows(grad, weight, offsets, table, count, turned=transposed, **told, **read)
    products = LOOPED if refuse_grouped(grad, [weight]) else BY_TORCH
    if used[1]:
        sides = [spread(*side).contiguous() for side in ((grad, grad_order, grad_choices), (x, order, choices))]
        d_weight = products.outer(*(reversed(sides) if transposed else sides), offsets)
    d_bias = None
    if used[-1] and bias is not None:
        d_bias = bias_gradient(products, spread(grad, grad_order, grad_choices), offsets, bias)
    return [d_x, d_weight, *d_a, *d_b, d_bias]
