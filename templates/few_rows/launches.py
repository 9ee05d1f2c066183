"""How the two kernels are started."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from .._launch import launch, multiprocessors, next_power_of_2
from ..nf4 import Weight
from .kernels import finish_kernel, product_kernel
from .limits import MAX_RANKS, MAX_ROWS, SIBLINGS, STEP, TILE
from .unpack import tables_of

__all__ = ["begin", "finish", "in_order"]

MAX_PARTS = 8
PIECES = 16  #: programs that multiply by all A


def in_order(x):
    """The columns of each 64 in the order in which threads have a weight's.

    Args:
        x: [rows, K], 64 divides K.

    Returns:
        [rows, K], contiguous.
    """
    rows, width = x.shape
    # element 16 t + 8 i + 4 j + 2 h + e of a row goes to 32 i + 16 j + 8 h + 2 t + e
    return x.reshape(rows, width // 64, 4, 2, 2, 2, 2).permute(0, 1, 3, 4, 5, 2, 6).reshape(rows, width)


def begin(x, ordered, weights: Sequence[Weight], a, *, blocksize=64, quant_type="nf4", absmax_blocksize=256):
    """Parts of x W_i^T and of x A_i^T, for up to three weights that share x.

    Args:
        x: [rows, K], any floating dtype, contiguous; at most `MAX_ROWS`, and 128 divides K.
        ordered: `in_order(x)`.
        weights: [N_i, K] each, 64 divides N_i; of one format: all double-quantised, or none.
        a: [r_i, K], any floating dtype, contiguous; one a weight, or none.
        blocksize: weights a block, 64 or a multiple of 128.
        quant_type: "nf4" or "fp4".
        absmax_blocksize: blocks that share a ``scale`` of double quantisation.

    Returns:
        (parts, xa), fp32 [P, rows, sum of N_i] and [Q, rows, sum of r_i]: their sums over P and Q are the products.
        Without adapters there is nothing in xa.

    Raises:
        ValueError: sizes do not fit.
    """
    rows, k = x.shape
    ranks = [m.shape[0] for m in a]
    if k % STEP or any(w.rows % TILE for w in weights) or rows > MAX_ROWS or sum(ranks) > MAX_RANKS:
        raise ValueError(f"{rows} rows of {k} columns, weights of {[w.rows for w in weights]}, ranks {ranks}")
    tiles = [sum(w.rows for w in weights[: i + 1]) // TILE for i in range(len(weights))]
    count = _parts(x, tiles[-1], k)
    more = next(n for n in range(max(1, PIECES // count), 0, -1) if k % (n * count * 64) == 0) if a else 0
    parts = torch.empty(count, rows, tiles[-1] * TILE, dtype=torch.float32, device=x.device)
    xa = torch.empty(max(1, more) * count, rows, max(1, sum(ranks)), dtype=torch.float32, device=x.device)
    blank = Weight(None, None, None, None, None, 0)
    arguments = []
    for i in range(SIBLINGS):
        arguments += [*(weights[i] if i < len(weights) else blank)[:5], tiles[min(i, len(tiles) - 1)]]
    launch(
        product_kernel,
        (tiles[-1] + more, count),
        ordered,
        x,
        *arguments,
        *(a[i] if i < len(a) else None for i in range(SIBLINGS)),
        parts,
        xa,
        more,
        rows,
        parts.shape[2],
        *tables_of(quant_type),
        K=k,
        LENGTH=k // count,
        PIECE=k // (max(1, more) * count),
        BLOCKSIZE=blocksize,
        ABSMAX_BLOCK=absmax_blocksize,
        NESTED=weights[0].code is not None,
        FP4=quant_type == "fp4",
        COUNT=len(weights),
        **{f"RANK{i}": ranks[i] if i < len(ranks) else 0 for i in range(SIBLINGS)},
        RANKS_POW2=max(16, next_power_of_2(sum(ranks))),
        PERMUTE=not triton.knobs.runtime.interpret and torch.version.hip is None,
        TILE=TILE,
        STEP=STEP,
        ROWS=max(16, next_power_of_2(rows)),
        num_warps=4,
        num_stages=3,
    )
    return parts, xa


def finish(parts, xa, b, factors, dtype):
    """The product, and what adapters add to it.

    Args:
        parts: fp32 [P, rows, N], of `begin`.
        xa: fp32 [Q, rows, R], of `begin`.
        b: [N_i, r_i], any floating dtype, unit column stride; one a weight.
        factors: of the adapters.
        dtype: of the results.

    Returns:
        (y, xa) in `dtype`: [rows, N] and [rows, R].
    """
    count, rows, columns = parts.shape
    tiles = [sum(m.shape[0] for m in b[: i + 1]) // TILE for i in range(len(b))]
    ranks = [m.shape[1] for m in b]
    out = torch.empty(rows, columns, dtype=dtype, device=parts.device)
    projected = torch.empty(rows, xa.shape[2], dtype=dtype, device=parts.device)
    arguments = []
    for i in range(SIBLINGS):
        arguments += [b[i], b[i].stride(0), tiles[i]] if i < len(b) else [None, 0, tiles[-1]]
    launch(
        finish_kernel,
        (columns // TILE,),
        parts,
        xa,
        *arguments[:-1],
        out,
        projected,
        rows,
        columns,
        PARTS=count,
        PIECES=xa.shape[0],
        COUNT=len(b),
        **{f"RANK{i}": ranks[i] if i < len(ranks) else 0 for i in range(SIBLINGS)},
        **{f"FACTOR{i}": factors[i] if i < len(factors) else 1.0 for i in range(SIBLINGS)},
        RANKS_POW2=max(16, next_power_of_2(sum(ranks))),
        TILE=TILE,
        ROWS=max(16, next_power_of_2(rows)),
        num_warps=4,
        num_stages=2,
    )
    return out, projected


def _parts(x, tiles: int, k: int) -> int:
    """Parts of the columns, for six programs on each multiprocessor: as many as run there at once."""
    fits = [count for count in (1, 2, 4, MAX_PARTS) if k % (count * STEP) == 0]
    return next((count for count in fits if tiles * count >= 6 * multiprocessors(x.device)), fits[-1])
