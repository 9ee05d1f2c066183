"""Products of few rows, sorted by expert, with the matrices of the experts that have any (arXiv:2211.15841).

A token's step of a rollout has some rows for each of a few experts. Packed stacks are not dequantised: of a hundred
experts a handful are read, and those once. A program finds its expert from the offsets, so there is no table of tiles.
Adapters are read in PEFT's layout, those of the same experts alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._launch import launch, next_power_of_2
from ..experts import tile_of
from ..nf4 import Weight
from .launches import permutes, step_of
from .limits import LEAST_STEP, MAX_RANKS, TILE
from .unpack import tables_of
from .weights import DENSE, times_rows

__all__ = ["downs", "rows"]

PIECES = 8  #: programs that multiply a tile of rows by A, at most


@triton.jit
def downs_kernel(
    x,  # [S, K]
    a,  # [EXPERTS * RANK, K]
    offsets,
    out,  # [PIECES, S, RANK]
    rows,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    RANK: tl.constexpr,
    RANK_POW2: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (piece of the columns, tile of rows)."""
    number = tl.arange(0, GROUPS)
    ends = tl.load(offsets + number, mask=number < EXPERTS, other=0)
    starts = tl.load(offsets + number - 1, mask=(number > 0) & (number <= EXPERTS), other=0)
    group, first, end = tile_of(tl.program_id(1), starts, ends, rows, EXPERTS, GROUPS, ROWS)
    if group < EXPERTS:
        row, rank = first + tl.arange(0, ROWS), tl.arange(0, RANK_POW2)
        there, inside = (row < end)[None, :], (rank < RANK)[:, None]
        k = tl.program_id(0) * LENGTH + tl.arange(0, STEP)
        lefts = a + (group * RANK + rank).to(tl.int64)[:, None] * K + k[None, :]
        rights = x + row.to(tl.int64)[None, :] * K + k[:, None]
        total = tl.zeros([RANK_POW2, ROWS], tl.float32)
        for begin in range(0, LENGTH, STEP):
            right = tl.load(rights + begin, mask=there, other=0.0)
            left = tl.load(lefts + begin, mask=inside, other=0.0).to(right.dtype)
            total = tl.dot(left, right, total, input_precision="ieee")
        at = out + (tl.program_id(0) * rows + row).to(tl.int64)[None, :] * RANK + rank[:, None]
        tl.store(at, total, mask=there & inside)


@triton.jit
def expert_rows_kernel(
    x,  # [S, K], for packed stacks the columns of each 64 in the order of `in_order`
    packed,
    absmax,
    code,
    scale,
    offset,
    offsets,
    xa,  # [PIECES, S, RANK]
    b,  # [COLUMNS, RANK * EXPERTS]
    bias,  # [EXPERTS, COLUMNS]
    out,  # [S, COLUMNS]
    rows,
    t0,  # of `tables_of`
    t1,
    t2,
    t3,
    t4,
    t5,
    t6,
    t7,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    N_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    RANK: tl.constexpr,
    RANK_POW2: tl.constexpr,
    PIECES: tl.constexpr,
    FACTOR: tl.constexpr,
    BIASED: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PERMUTE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (tile of a matrix's rows, tile of rows of x)."""
    number = tl.arange(0, GROUPS)
    ends = tl.load(offsets + number, mask=number < EXPERTS, other=0)
    starts = tl.load(offsets + number - 1, mask=(number > 0) & (number <= EXPERTS), other=0)
    group, first, end = tile_of(tl.program_id(1), starts, ends, rows, EXPERTS, GROUPS, ROWS)
    if group <= EXPERTS:
        row, column = first + tl.arange(0, ROWS), tl.program_id(0) * TILE + tl.arange(0, TILE)
        there = (row < end)[None, :]
        total = tl.zeros([TILE, ROWS], tl.float32)
        if group < EXPERTS:
            n = group * COLUMNS + column
            if FORMAT == DENSE:  # whose matrices may be the other way round
                packed += group.to(tl.int64) * COLUMNS * K
                n = column
            total = times_rows(
                *(n, x, row.to(tl.int64)[None, :] * K, there, (packed, absmax, code, scale, offset), 0),
                *((t0, t1, t2, t3, t4, t5, t6, t7), K, K, FORMAT, N_STRIDE, K_STRIDE),
                *(BLOCKSIZE, ABSMAX_BLOCK, NESTED, PERMUTE, TILE, STEP, ROWS),
            )
            if RANK > 0:
                rank = tl.arange(0, RANK_POW2)
                inside = (rank < RANK)[:, None]
                narrow = tl.zeros([RANK_POW2, ROWS], tl.float32)
                for piece in tl.static_range(PIECES):
                    at = xa + (piece * rows + row).to(tl.int64)[None, :] * RANK + rank[:, None]
                    narrow += tl.load(at, mask=there & inside, other=0.0)
                where = column.to(tl.int64)[:, None] * (RANK * EXPERTS) + (rank * EXPERTS + group)[None, :]
                wide = FACTOR * tl.load(b + where, mask=(rank < RANK)[None, :], other=0.0).to(tl.float32)
                total += tl.dot(wide.to(x.dtype.element_ty), narrow.to(x.dtype.element_ty), input_precision="ieee")
            if BIASED:
                total += tl.load(bias + group.to(tl.int64) * COLUMNS + column)[:, None].to(tl.float32)
        tl.store(out + row.to(tl.int64)[None, :] * COLUMNS + column[:, None], total, mask=there)


def _tiling(count: int, experts: int) -> tuple[int, dict[str, int]]:
    """(Tiles of rows that there may be, constants of `tile_of`): most experts have twice the mean at most."""
    each = min(64, max(16, next_power_of_2(2 * triton.cdiv(count, experts))))
    groups = min(experts + 1, count)  # one of no expert
    return groups + (count - groups) // each, {"EXPERTS": experts, "GROUPS": next_power_of_2(experts + 1), "ROWS": each}


def downs(x, a, offsets):
    """Parts of each row times A of its expert.

    Args:
        x: [S, K], any floating dtype, contiguous; 64 divides K.
        a: [E * r, K], any floating dtype, contiguous, expert by expert.
        offsets: [E], int32 or int64: where the rows of each expert end. Rows behind the last offset have no expert.

    Returns:
        fp32 [P, S, r], whose sum over P is the product; undefined in rows of no expert.

    Raises:
        ValueError: sizes do not fit.
    """
    (count, k), experts = x.shape, offsets.shape[0]
    rank = a.shape[0] // experts
    if k % LEAST_STEP or rank > MAX_RANKS:
        raise ValueError(f"rows of {k} columns, adapters of rank {rank}")
    pieces = next(n for n in range(PIECES, 0, -1) if k % (n * LEAST_STEP) == 0)
    tiles, constants = _tiling(count, experts)
    out = torch.empty(pieces, count, rank, dtype=torch.float32, device=x.device)
    launch(
        downs_kernel,
        (pieces, tiles),
        *(x, a, offsets, out, count),
        **dict(K=k, LENGTH=k // pieces, RANK=rank, RANK_POW2=max(16, next_power_of_2(rank)), STEP=LEAST_STEP),
        **constants,
        **dict(num_warps=4, num_stages=2),
    )
    return out


def rows(
    x,
    weight: Weight,
    offsets,
    *,
    blocksize=64,
    quant_type="nf4",
    absmax_blocksize=256,
    turned=True,
    xa=None,
    b=None,
    factor=1.0,
    bias=None,
):
    """Each row times the matrix of its expert, plus adapter and bias; 0 in rows of no expert.

    Args:
        x: [S, K], fp16 or bf16, contiguous; 64 divides K. For packed stacks its columns are `launches.in_order`.
        weight: a stack as one weight of E * N rows, 64 divides N. Of MXFP4 absmax has the exponents, uint8 of
            E * N * K / 32 elements. A dense stack, contiguous, is what is packed.
        offsets: [E], int32 or int64: where the rows of each expert end.
        blocksize: weights a block, a multiple of 64, if the stack is NF4 or FP4.
        quant_type: "nf4", "fp4", "mxfp4" or "dense".
        absmax_blocksize: blocks that share a ``scale`` of double quantisation.
        turned: whether a dense stack is [E, N, K], not [E, K, N].
        xa, b: of `downs`, and [N, r * E], any floating dtype, contiguous, an expert's columns E apart.
        factor: of the adapter.
        bias: [E, N], any floating dtype, contiguous.

    Returns:
        [S, N] in x's dtype.

    Raises:
        ValueError: sizes do not fit.
    """
    (count, k), experts, dense = x.shape, offsets.shape[0], quant_type == "dense"
    columns, rank = weight.rows // experts, 0 if xa is None else xa.shape[2]
    if k % LEAST_STEP or columns % TILE:
        raise ValueError(f"matrices of {columns} rows and {k} columns")
    out = torch.empty(count, columns, dtype=x.dtype, device=x.device)
    tiles, constants = _tiling(count, experts)
    launch(
        expert_rows_kernel,
        (columns // TILE, tiles),
        *(x, *weight[:5], offsets, xa, b, bias, out, count, *tables_of("nf4" if dense else quant_type)),
        **dict(K=k, COLUMNS=columns, FORMAT=quant_type),
        **dict(N_STRIDE=k if turned else 1, K_STRIDE=1 if turned else columns),
        **dict(BLOCKSIZE=blocksize, ABSMAX_BLOCK=absmax_blocksize, NESTED=weight.code is not None),
        **dict(RANK=rank, RANK_POW2=max(16, next_power_of_2(rank)), PIECES=0 if xa is None else xa.shape[0]),
        **dict(FACTOR=factor, BIASED=bias is not None, **constants),
        PERMUTE=permutes(),
        **dict(TILE=TILE, STEP=step_of(k, blocksize), num_warps=4, num_stages=4 if dense else 3),
    )
    return out
