"""How the two kernels are started."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from .._launch import launch, multiprocessors, next_power_of_2
from ..nf4 import Weight
from .kernels import finish_kernel, product_kernel
from .limits import LEAST_STEP, MAX_RANKS, MAX_ROWS, SIBLINGS, STEP, TILE
from .unpack import tables_of

__all__ = ["begin", "finish", "height", "in_order", "permutes", "step_of"]

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


def permutes() -> bool:
    """Whether kernels permute bytes by an instruction of NVIDIA's."""
    return not triton.knobs.runtime.interpret and torch.version.hip is None


def step_of(k: int, blocksize: int = LEAST_STEP) -> int:
    """Columns at once: those of one block, or of two of `LEAST_STEP`."""
    return STEP if k % STEP == 0 and (blocksize == LEAST_STEP or blocksize % STEP == 0) else LEAST_STEP


def begin(x, ordered, weights: Sequence[Weight], a, *, blocksize=64, quant_type="nf4", absmax_blocksize=256):
    """Parts of x W_i^T and of x A_i^T, for up to three weights that share x.

    Args:
        x: [rows, K], any floating dtype, contiguous; at most `MAX_ROWS`, and 64 divides K.
        ordered: `in_order(x)`; x itself for dense weights.
        weights: [N_i, K] each, of one format: all double-quantised, or none. A dense weight is what is packed, with
            unit column stride, and its rows are as far apart as those of the others.
        a: [r_i, K], any floating dtype, contiguous; one a weight, or none.
        blocksize: weights a block, a multiple of 64.
        quant_type: "nf4", "fp4" or "dense".
        absmax_blocksize: blocks that share a ``scale`` of double quantisation.

    Returns:
        (parts, xa), fp32 [P, rows, sum of `height(N_i)`] and [Q, rows, sum of r_i]: their sums over P and Q are the
        products. Columns behind those of a weight have no meaning. Without adapters there is nothing in xa.

    Raises:
        ValueError: sizes do not fit.
    """
    rows, k = x.shape
    ranks = [m.shape[0] for m in a]
    if k % LEAST_STEP or rows > MAX_ROWS or sum(ranks) > MAX_RANKS or len(weights) > SIBLINGS:
        raise ValueError(f"{rows} rows of {k} columns, weights of {[w.rows for w in weights]}, ranks {ranks}")
    tiles = _tiles([w.rows for w in weights])
    dense, step = quant_type == "dense", step_of(k, blocksize)
    count = _parts(x, tiles[-1], k, step, beside=2 if dense else 6)
    more = next(n for n in range(max(1, PIECES // count), 0, -1) if k % (n * count * 64) == 0) if a else 0
    parts = torch.empty(count, rows, tiles[-1] * TILE, dtype=torch.float32, device=x.device)
    xa = torch.empty(max(1, more) * count, rows, max(1, sum(ranks)), dtype=torch.float32, device=x.device)
    blank = Weight(None, None, None, None, None, 0)
    arguments = []
    for i in range(SIBLINGS):
        arguments += [*(weights[i] if i < len(weights) else blank), tiles[min(i, len(tiles) - 1)]]
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
        *tables_of("nf4" if dense else quant_type),
        K=k,
        LENGTH=k // count,
        PIECE=k // (max(1, more) * count),
        FORMAT=quant_type,
        STRIDE=weights[0].packed.stride(0) if dense else 0,
        BLOCKSIZE=blocksize,
        ABSMAX_BLOCK=absmax_blocksize,
        NESTED=weights[0].code is not None,
        COUNT=len(weights),
        WHOLE=all(w.rows % TILE == 0 for w in weights),
        **{f"RANK{i}": ranks[i] if i < len(ranks) else 0 for i in range(SIBLINGS)},
        RANKS_POW2=max(16, next_power_of_2(sum(ranks))),
        PERMUTE=permutes(),
        TILE=TILE,
        STEP=step,
        ROWS=max(16, next_power_of_2(rows)),
        num_warps=4,
        num_stages=4 if dense else 3,
    )
    return parts, xa


def finish(parts, xa, b, factors, dtype):
    """The product, and what adapters add to it.

    Args:
        parts: fp32 [P, rows, N], of `begin`, N the sum of `height(N_i)`.
        xa: fp32 [Q, rows, R], of `begin`.
        b: [N_i, r_i], any floating dtype, unit column stride; one a weight.
        factors: of the adapters.
        dtype: of the results.

    Returns:
        (y, xa) in `dtype`: [rows, sum of N_i] and [rows, R].
    """
    count, rows, columns = parts.shape
    heights = [m.shape[0] for m in b]
    tiles = _tiles(heights)
    ranks = [m.shape[1] for m in b]
    out = torch.empty(rows, columns, dtype=dtype, device=parts.device)
    projected = torch.empty(rows, xa.shape[2], dtype=dtype, device=parts.device)
    arguments = []
    for i in range(SIBLINGS):
        arguments += [b[i], b[i].stride(0), heights[i], tiles[i]] if i < len(b) else [None, 0, 1, tiles[-1]]
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
    if columns == sum(heights):
        return out, projected
    return torch.cat([y[:, :n] for y, n in zip(out.split([height(n) for n in heights], 1), heights)], 1), projected


def height(rows: int) -> int:
    """Columns of a weight's product in the parts: whole tiles."""
    return triton.cdiv(rows, TILE) * TILE


def _tiles(rows: Sequence[int]) -> list[int]:
    """How many tiles these weights have, each with those before it."""
    return [sum(map(height, rows[: i + 1])) // TILE for i in range(len(rows))]


def _parts(x, tiles: int, k: int, step: int, beside: int) -> int:
    """Parts of the columns, for as many programs as run `beside` each other on all multiprocessors."""
    fits = [count for count in range(1, MAX_PARTS + 1) if k % (count * step) == 0]
    return next((count for count in fits if tiles * count >= beside * multiprocessors(x.device)), fits[-1])
