"""Copy each token to a row for each of its experts, sorted by expert, and sum a token's rows afterwards.

Neither direction uses atomic additions, and sums have a fixed order, so a step is reproducible bit for bit.
"""

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op


def spread(x: Tensor, order: Tensor | None, choices: int) -> Tensor:
    """Row order[s] // choices of x for each s; x itself without an order."""
    if order is None:
        return x
    return x[order // choices] if choices > 1 else x[order]


def collected(y: Tensor, places: Tensor, choices: int, dtype: torch.dtype) -> Tensor:
    """The sum of each token's rows in fp32 (fp64 for fp64), rounded once."""
    rows = y[places]
    if choices == 1:
        return rows.to(dtype)
    wide = torch.promote_types(y.dtype, torch.float32)
    return rows.reshape(-1, choices, *y.shape[1:]).to(wide).sum(1).to(dtype)


@op(cost=Cost.POINTWISE)
def spread_rows(x: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
    """Return row order[s] // choices of x for each s: each token once for each of its experts (arXiv:2211.15841).

    Args:
        x: [T, ...], any floating dtype.
        order: [T * choices], int64: a permutation; row s of the result is choice order[s].
        places: the inverse permutation: the row of each choice.
        choices: rows per token; the choices of a token are adjacent.

    Returns:
        [T * choices, ...] in x's dtype.
    """
    return spread(x, order, choices)


@spread_rows.backward(gives=("x",))
def spread_rows_backward(grad, order, places, choices) -> list[Tensor]:
    """Return the gradient of `spread_rows`: a token's rows, summed in the order of its choices.

    Args:
        grad: of the result, in its shape and dtype. The others are inputs of `spread_rows`.

    Returns:
        [dx], in x's shape and dtype.
    """
    return [collected(grad, places, choices, grad.dtype)]


@op(cost=Cost.POINTWISE)
def collect_rows(y: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
    """Return the sum of each token's rows, in the order of its choices, as in arXiv:2211.15841.

    Args:
        y: [T * choices, ...], any floating dtype. Sums are in fp32, in fp64 for fp64.
        order: [T * choices], int64: a permutation; row s of y is choice order[s].
        places: the inverse permutation: the row of each choice.
        choices: rows per token; the choices of a token are adjacent.

    Returns:
        [T, ...] in y's dtype.
    """
    return collected(y, places, choices, y.dtype)


@collect_rows.backward(gives=("y",))
def collect_rows_backward(grad, order, places, choices) -> list[Tensor]:
    """Return the gradient of `collect_rows`: a token's, for each of its rows.

    Args:
        grad: of the result, in its shape and dtype. The others are inputs of `collect_rows`.

    Returns:
        [dy], in y's shape and dtype.
    """
    return [spread(grad, order, choices)]


@op(cost=Cost.POINTWISE)
def inverse_order(order: Tensor) -> Tensor:
    """Return the inverse of a permutation without a sort, as in arXiv:2211.15841.

    Args:
        order: [S], int64: a permutation of 0 ... S - 1.

    Returns:
        [S], int64: the position of each number in `order`.
    """
    index = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter(0, order, index)
