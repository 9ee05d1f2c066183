"""A product of INT8 operands on tensor cores: exact sums in int32, scaled, with a low-rank adapter's term in fp32.

Both operands are contiguous along the dimension that is summed over, as ``eight_bits`` writes them: tensor cores take 8
bits in no other layout. Triton has such products from Ampere on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch

__all__ = ["product"]

TOGETHER = 8  #: tiles of rows that share a tile of columns while it is in L2
RANKS_AT_A_TIME = 16  #: the least that tensor cores multiply


@triton.jit
def product_kernel(
    a,
    a_scales,
    b,
    b_scales,
    extra,
    adapter,
    out,
    n_rows,
    n_columns,
    extra_stride,
    row_stride,
    rank_stride,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program: ROWS x COLUMNS. Programs go down TOGETHER tiles before they go to the next columns."""
    down, across = tl.cdiv(n_rows, ROWS), tl.cdiv(n_columns, COLUMNS)
    group, place = tl.program_id(0) // (TOGETHER * across), tl.program_id(0) % (TOGETHER * across)
    height = tl.minimum(down - group * TOGETHER, TOGETHER)
    row = (group * TOGETHER + place % height) * ROWS + tl.arange(0, ROWS)
    column = place // height * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP)
    # Beyond the last row the last one is read again, so that loads need no mask.
    a += tl.minimum(row, n_rows - 1).to(tl.int64)[:, None] * WIDTH + k[None, :]
    b += tl.minimum(column, n_columns - 1).to(tl.int64)[None, :] * WIDTH + k[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.int32)
    for _ in range(0, WIDTH, STEP):
        sums = tl.dot(tl.load(a), tl.load(b), sums, out_dtype=tl.int32)
        a += STEP
        b += STEP
    above, left = row < n_rows, column < n_columns
    y = sums.to(tl.float32) * tl.load(a_scales + row, mask=above, other=0.0)[:, None]
    if b_scales is not None:
        y *= tl.load(b_scales + column, mask=left, other=0.0)[None, :]
    wide = row.to(tl.int64)[:, None]
    if RANKS > 0:
        for first in tl.range(0, RANKS, RANK_BLOCK, num_stages=1):
            rank = first + tl.arange(0, RANK_BLOCK)
            here, there = above[:, None] & (rank < RANKS)[None, :], left[None, :] & (rank < RANKS)[:, None]
            p = tl.load(extra + wide * extra_stride + rank[None, :], mask=here, other=0.0)
            q = tl.load(adapter + column[None, :] * row_stride + rank[:, None] * rank_stride, mask=there, other=0.0)
            y = tl.dot(p.to(out.dtype.element_ty), q.to(out.dtype.element_ty), y)
    inside = above[:, None] & left[None, :]
    tl.store(out + wide * n_columns + column[None, :], y.to(out.dtype.element_ty), mask=inside)


def product(a, a_scales, b, b_scales, extra, adapter, dtype, *, tile=None):
    """(a b^T) a_scales b_scales + extra adapter^T.

    Args:
        a: int8 [T, C], contiguous; 128 divides C.
        a_scales: fp32, T elements.
        b: int8 [N, C], contiguous.
        b_scales: fp32, N elements; or None for 1.
        extra: [T, R], any floating dtype, unit column stride; or None, as is adapter.
        adapter: [N, R], any floating dtype and strides; both are rounded to ``dtype``.
        dtype: of the result, bf16 or fp16.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        [T, N] in ``dtype``, rounded once from fp32.

    Raises:
        ValueError: C is no multiple of what a program multiplies at a time.
    """
    (rows, width), columns = a.shape, b.shape[0]
    tile = tile or _tiles.pick("int8_product", a, columns)
    if width % tile.step or b.shape[1] != width:
        raise ValueError(f"operands are {width} and {b.shape[1]} wide: both must be the same multiple of {tile.step}")
    out = torch.empty((rows, columns), dtype=dtype, device=a.device)
    launch(
        product_kernel,
        (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.block),),
        *(a, a_scales, b, b_scales, extra, adapter, out, rows, columns),
        0 if extra is None else extra.stride(0),
        *((0, 0) if adapter is None else adapter.stride()),
        **dict(WIDTH=width, RANKS=0 if extra is None else extra.shape[1], RANK_BLOCK=RANKS_AT_A_TIME),
        **dict(TOGETHER=TOGETHER, ROWS=tile.rows, COLUMNS=tile.block, STEP=tile.step),
        **dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return out
