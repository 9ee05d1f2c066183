"""Products of few rows with the matrices of their experts, by the template that reads those experts alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile.notes import Note, note
from tunecompile.ops.experts.adapted_stack import padded_rank
from tunecompile.ops.experts.products import inside
from tunecompile.ops.experts.rows import spread
from tunecompile.ops.packed.few_rows import refuse_kernel
from tunecompile.templates.few_rows.limits import LEAST_STEP, MAX_RANKS, TILE

MOST = 512  #: rows: 64 tokens of 8 experts each
BECAUSE = "few rows: the experts that have any are read, once, and nothing is dequantised"


def refuse(
    x: Tensor, rows: int, experts: int, a: Sequence[Tensor], b: Sequence[Tensor], bias: Tensor | None
) -> Note | None:
    """Return why the template does not multiply rows by a stack [E, N, K], or None.

    Args:
        x: [S, K].
        rows: N.
        experts: E.
        a, b, bias: as for `tunecompile.ops.experts.grouped_linear.grouped_lora_linear`.
    """
    if reason := refuse_kernel(x, MOST):
        return reason
    if x.shape[1] % LEAST_STEP or rows % TILE or len(a) > 1:
        return note("arguments-not-supported")
    if a and (rank := a[0].shape[0] // experts) > MAX_RANKS:
        return note("rank-too-large", rank=rank, limit=MAX_RANKS)
    dense = all(each is None or each.is_contiguous() for each in (*a, *b, bias))
    return None if dense else note("not-contiguous", "weights or adapters are")


def product(
    x: Tensor, weight, offsets: Tensor, a, b, scales, bias: Tensor | None, *, quant_type: str, **form
) -> tuple[Tensor, Tensor | None]:
    """Return y of `grouped_lora_linear`, and parts of xa, by the template; `refuse` returns None.

    Args:
        x: [S, K]. This, offsets, a, b, scales and bias: as for `grouped_lora_linear`.
        weight, quant_type, form: as `tunecompile.templates.few_rows.experts.rows` takes them.
    """
    from tunecompile.templates.few_rows import experts, launches

    x = x.contiguous()
    xa = experts.downs(x, a[0], offsets) if a else None
    adapter = {"xa": xa, "b": b[0], "factor": scales[0]} if a else {}
    ordered = x if quant_type == "dense" else launches.in_order(x).contiguous()
    return experts.rows(ordered, weight, offsets, bias=bias, quant_type=quant_type, **adapter, **form), xa


def refuse_dense(x: Tensor, weight: Tensor, a, b, transposed: bool, bias: Tensor | None) -> Note | None:
    """As `refuse`, of a dense stack, [E, N, K] or, `transposed`, [E, K, N]."""
    if reason := refuse(x, weight.shape[2 if transposed else 1], weight.shape[0], a, b, bias):
        return reason
    if x.dtype != weight.dtype:
        return note("dtypes-differ", "rows and the stack of weights")
    return None if weight.is_contiguous() else note("not-contiguous", "stacks of weights are")


def refuse_gathered(x: Tensor, order: Tensor, choices: int, weight: Tensor, a, b, transposed, bias) -> Note | None:
    """As `refuse_dense`, of rows that are read through an order."""
    return refuse_dense(x.new_empty(order.shape[0], x.shape[1]), weight, a, b, transposed, bias)


def gathered(x, order, choices, weight, offsets, a, b, scales, transposed, bias) -> tuple[Tensor, Tensor]:
    """Return (y, xa) of `grouped_lora_linear` for row order[s] // choices of x for each s, or of row s without one."""
    from tunecompile.templates.nf4 import Weight

    experts, rows = weight.shape[0], weight.shape[2 if transposed else 1]
    stack, x = Weight(weight, None, None, None, None, experts * rows), spread(x, order, choices)
    y, parts = product(x, stack, offsets, a, b, scales, bias, quant_type="dense", turned=not transposed)
    if parts is None:
        return y, x.new_zeros(x.shape[0], 0)
    xa = torch.where(inside(x.shape[0], offsets), parts.sum(0), 0).to(x.dtype)
    return y, torch.nn.functional.pad(xa, (0, padded_rank(a, experts) - xa.shape[1]))
