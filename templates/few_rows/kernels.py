"""The two kernels: products of parts of the columns, and their sums with what adapters add."""

from __future__ import annotations

import triton
import triton.language as tl

from .weights import times_rows

__all__ = ["finish_kernel", "product_kernel"]


@triton.jit
def _times_adapters(
    x,
    a0,
    a1,
    a2,
    xa,
    part,
    rows,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    COUNT: tl.constexpr,
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, rank = tl.arange(0, ROWS), tl.arange(0, RANKS_POW2)
    there = (row < rows)[None, :]
    second = rank - RANK0
    third = second - RANK1
    column = tl.arange(0, 64)
    narrow = tl.zeros([RANKS_POW2, ROWS], tl.float32)
    for begin in tl.range(part * LENGTH, part * LENGTH + LENGTH, 64, num_stages=1):  # A's tiles are large in fp32
        k = begin + column
        a = tl.load(a0 + rank[:, None] * K + k[None, :], mask=(second < 0)[:, None], other=0.0).to(tl.float32)
        if COUNT > 1:
            mine = (second >= 0) & (third < 0)
            a += tl.load(a1 + second[:, None] * K + k[None, :], mask=mine[:, None], other=0.0).to(tl.float32)
        if COUNT > 2:
            mine = (third >= 0) & (third < RANK2)
            a += tl.load(a2 + third[:, None] * K + k[None, :], mask=mine[:, None], other=0.0).to(tl.float32)
        wide = tl.load(x + row[None, :].to(tl.int64) * K + k[:, None], mask=there, other=0.0)
        narrow += tl.dot(a.to(x.dtype.element_ty), wide)
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    out = xa + (part * rows + row)[None, :] * RANKS + rank[:, None]
    tl.store(out, narrow, mask=there & (rank < RANKS)[:, None])


@triton.jit
def product_kernel(
    x,  # [rows, K], for packed weights the columns of each 64 in the order of `in_order`
    plain,  # [rows, K]
    packed0,
    absmax0,
    code0,
    scale0,
    offset0,
    height0,  # rows
    tiles0,  # programs of this weight and of those before it
    packed1,
    absmax1,
    code1,
    scale1,
    offset1,
    height1,
    tiles1,
    packed2,
    absmax2,
    code2,
    scale2,
    offset2,
    height2,
    tiles2,
    a0,  # LoRA's A of each weight, [RANK, K]
    a1,
    a2,
    parts,  # [PARTS, rows, columns]
    xa,  # [PIECES, rows, RANKS]
    before,  # programs of the adapters
    rows,
    columns,
    t0,  # of `tables_of`
    t1,
    t2,
    t3,
    t4,
    t5,
    t6,
    t7,
    K: tl.constexpr,
    LENGTH: tl.constexpr,  # columns of a part
    PIECE: tl.constexpr,  # of a product with A
    FORMAT: tl.constexpr,
    STRIDE: tl.constexpr,  # of a dense weight's rows
    BLOCKSIZE: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    COUNT: tl.constexpr,
    WHOLE: tl.constexpr,  # whether all weights are whole tiles
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    PERMUTE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (tile of a weight's rows, part of the columns). The first ones multiply by the adapters' A."""
    tile = tl.program_id(0) - before
    part = tl.program_id(1)
    weights = (
        (packed0, absmax0, code0, scale0, offset0),
        (packed1, absmax1, code1, scale1, offset1),
        (packed2, absmax2, code2, scale2, offset2),
    )
    heights, begins, ends = (height0, height1, height2), (0, tiles0, tiles1), (tiles0, tiles1, tiles2)
    for i in tl.static_range(COUNT):
        if (tile >= begins[i]) & (tile < ends[i]):
            row, n = tl.arange(0, ROWS), tl.arange(0, TILE)
            there = (row < rows)[None, :]
            mine = (tile - begins[i]) * TILE + n
            if not WHOLE:  # behind the last row it is read again
                mine = tl.minimum(mine, heights[i] - 1)
            total = times_rows(
                *(mine, x, row[None, :].to(tl.int64) * K, there, weights[i]),
                *(part * LENGTH, (t0, t1, t2, t3, t4, t5, t6, t7), K, LENGTH, FORMAT, STRIDE, 1),
                *(BLOCKSIZE, ABSMAX_BLOCK, NESTED, PERMUTE, TILE, STEP, ROWS),
            )
            out = parts + (part * rows + row).to(tl.int64)[None, :] * columns + (tile * TILE + n)[:, None]
            tl.store(out, total, mask=there)
    if RANK0 > 0 and tile < 0:
        piece = tl.program_id(0) * tl.num_programs(1) + part
        _times_adapters(plain, a0, a1, a2, xa, piece, rows, K, PIECE, COUNT, RANK0, RANK1, RANK2, RANKS_POW2, ROWS)


@triton.jit
def finish_kernel(
    parts,  # [PARTS, rows, columns]
    xa,  # [PIECES, rows, RANKS]
    b0,  # LoRA's B of each weight, [its rows, RANK], unit column stride
    stride0,
    height0,
    tiles0,
    b1,
    stride1,
    height1,
    tiles1,
    b2,
    stride2,
    height2,
    out,  # [rows, columns]
    projected,  # [rows, RANKS]
    rows,
    columns,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    COUNT: tl.constexpr,
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    FACTOR0: tl.constexpr,
    FACTOR1: tl.constexpr,
    FACTOR2: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A tile of columns of the sum of the parts, and of the adapters: FACTOR (sum of xa) B^T."""
    tile = tl.program_id(0)
    RANKS: tl.constexpr = RANK0 + RANK1 + RANK2
    row, rank = tl.arange(0, ROWS), tl.arange(0, RANKS_POW2)
    there = (row < rows)[None, :]
    n = tl.arange(0, TILE)
    column = (tile * TILE + n)[:, None]
    inside = there & (rank < RANKS)[:, None]
    total = tl.zeros([TILE, ROWS], tl.float32)
    narrow = tl.zeros([RANKS_POW2, ROWS], tl.float32)
    for part in tl.static_range(PARTS):  # all loads at once
        at = (part * rows + row)[None, :]
        total += tl.load(parts + at.to(tl.int64) * columns + column, mask=there, other=0.0)
    for piece in tl.static_range(PIECES):
        narrow += tl.load(xa + (piece * rows + row)[None, :] * RANKS + rank[:, None], mask=inside, other=0.0)
    # Each weight's tiles read their own adapter, beside zeros for the others'
    mine = rank < tl.where(tile < tiles0, RANK0, 0)
    where = tl.minimum(tile * TILE + n, height0 - 1).to(tl.int64)[:, None] * stride0 + rank[None, :]
    wide = FACTOR0 * tl.load(b0 + where, mask=mine[None, :], other=0.0).to(tl.float32)
    if COUNT > 1:
        mine = (rank >= RANK0) & (rank < tl.where((tile >= tiles0) & (tile < tiles1), RANK0 + RANK1, 0))
        where = tl.minimum((tile - tiles0) * TILE + n, height1 - 1).to(tl.int64)[:, None] * stride1
        wide += FACTOR1 * tl.load(b1 + where + (rank - RANK0)[None, :], mask=mine[None, :], other=0.0).to(tl.float32)
    if COUNT > 2:
        mine = (rank >= RANK0 + RANK1) & (rank < tl.where(tile >= tiles1, RANKS, 0))
        where = tl.minimum((tile - tiles1) * TILE + n, height2 - 1).to(tl.int64)[:, None] * stride2
        where += (rank - RANK0 - RANK1)[None, :]
        wide += FACTOR2 * tl.load(b2 + where, mask=mine[None, :], other=0.0).to(tl.float32)
    narrow = narrow.to(out.dtype.element_ty)
    total += tl.dot(wide.to(out.dtype.element_ty), narrow)
    tl.store(out + row.to(tl.int64)[None, :] * columns + column, total, mask=there)
    if tile == 0:
        tl.store(projected + row[None, :] * RANKS + rank[:, None], narrow, mask=inside)
