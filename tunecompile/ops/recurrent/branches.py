"""Tokens that rows share, for ops that read a row from its first token on: as rows, and back.

Such tokens are there once, in a forest of N. In front of a recurrence each row gets its copy, R tokens in all; behind
it the first copy of each token is taken. (All copies of a token have the same tokens before them.)
"""

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op
from tunecompile.ops.norms.rms_norm import compute_dtype


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """x [1, N, ...] at these places, [1, *index.shape, ...]; 0 where one is negative."""
    there = (index >= 0).view(1, *index.shape, *[1] * (x.dim() - 2))
    return torch.where(there, x[:, index.clamp(min=0)], 0)


def _like_rows(x: Tensor, rows: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty((1, rows.shape[0], *x.shape[2:]))


def _like_tokens(made: Tensor, own: Tensor) -> Tensor:
    return made.new_empty((1, own.shape[1], *made.shape[2:]))


@op(cost=Cost.POINTWISE, shapes=_like_rows)
def branch_rows(x: Tensor, rows: Tensor, own: Tensor, again: Tensor) -> Tensor:
    """Return the tokens of whole rows: a token that several rows share comes once for each.

    Args:
        x: [1, N, ...], any floating dtype.
        rows: int32 [R]: for each token of the rows its place among the N; -1 for one that fills up.
        own: int32 [2, N]: for each of the N its first place among the R, -1 for one that fills up; and its place among
            the M that have further copies, -1 without any.
        again: int32 [K, M]: further places among the R, in the order of rows; -1 where there are fewer.

    Returns:
        [1, R, ...] in x's dtype, contiguous; 0 at what fills up.
    """
    return _taken(x, rows).contiguous()


@branch_rows.backward(gives=("x",), shapes=lambda grad, own, again: [_like_tokens(grad, own)])
def branch_rows_backward(grad, own, again) -> list[Tensor]:
    """Return the gradient of x: copies' are summed in fp32 (fp64 for fp64), always in one order, and rounded once.

    Args:
        grad: of the rows, [1, R, ...] in x's dtype. The others are inputs of `branch_rows`.

    Returns:
        [dx], [1, N, ...]; 0 at what fills up.
    """
    wide = compute_dtype(grad.dtype)
    further = _taken(grad, again).to(wide).sum(1)
    total = _taken(grad, own[0]).to(wide) + _taken(further, own[1])
    return [total.to(grad.dtype).contiguous()]


# saved: what it is taken of would be, otherwise, with all copies
@op(cost=Cost.MATMUL, shapes=lambda made, rows, own: _like_tokens(made, own))
def first_copies(made: Tensor, rows: Tensor, own: Tensor) -> Tensor:
    """Return the first copy of each token of what was made of whole rows.

    Args:
        made: [1, R, ...], any floating dtype.
        rows, own: as for `branch_rows`.

    Returns:
        [1, N, ...] in the dtype of `made`, contiguous; 0 at what fills up.
    """
    return _taken(made, own[0]).contiguous()


@first_copies.backward(gives=("made",), cost=Cost.POINTWISE, shapes=lambda grad, rows, own: [_like_rows(grad, rows)])
def first_copies_backward(grad, rows, own) -> list[Tensor]:
    """Return the gradient of `made`: that of each token at its first copy, and 0 at the others.

    Args:
        grad: of the tokens, [1, N, ...]. The others are inputs of `first_copies`.

    Returns:
        [dmade], [1, R, ...].
    """
    place = torch.arange(rows.shape[0], device=rows.device)
    first = own[0][rows.clamp(min=0)] == place
    return [_taken(grad, torch.where(first, rows, -1)).contiguous()]
