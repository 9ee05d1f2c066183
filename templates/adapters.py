"""Products of fp32 adapters with bf16 rows on tensor cores, as exact as in fp32 (adapters: arXiv:2106.09685).

Rows are exact in bf16, and an fp32 number is the sum of three numbers in bf16, so three products in bf16 are one in
fp32 (Henry, Tang and Heinecke, 2019, arXiv:1904.06376). Hopper's tensor cores round sums towards zero, which over
thousands of terms is ten times an fp32 product's error. So each step's sum begins at zero, and sums of steps are added
in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, next_power_of_2

__all__ = ["project", "reduce"]

WIDEST = 64  #: columns of adapters a program; more are other programs
PARTS = 16  #: of all rows, each summed by programs of its own


@triton.jit
def _times(wide, narrow):
    """The product of a matrix in bf16 with one in fp32, smallest piece first."""
    high = narrow.to(tl.bfloat16)
    rest = narrow - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = rest - middle.to(tl.float32)
    total = tl.dot(wide, low.to(wide.dtype), input_precision="ieee")
    total = tl.dot(wide, middle.to(wide.dtype), total, input_precision="ieee")
    return tl.dot(wide, high.to(wide.dtype), total, input_precision="ieee")


@triton.jit
def project_kernel(
    x,
    m,
    out,
    rows,
    x_stride,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    K_STRIDE: tl.constexpr,
    R_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (tile of rows, part of their columns, block of the adapters')."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    length: tl.constexpr = (WIDTH + PARTS * STEP - 1) // (PARTS * STEP) * STEP
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for begin in range(part * length, min(WIDTH, (part + 1) * length), STEP):
        k = begin + tl.arange(0, STEP)
        wide = tl.load(
            x + row[:, None] * x_stride + k[None, :], mask=(row < rows)[:, None] & (k < WIDTH)[None, :], other=0.0
        )
        there = m + k[:, None] * K_STRIDE + r[None, :] * R_STRIDE
        total += _times(wide, tl.load(there, mask=(k < WIDTH)[:, None] & (r < RANK)[None, :], other=0.0))
    out += (part * rows + row[:, None]) * RANK + r[None, :]
    tl.store(out, total, mask=(row < rows)[:, None] & (r < RANK)[None, :])


def project(x, m):
    """Parts of x m, of which each is the product over some of the columns.

    Args:
        x: [T, K], bf16, unit column stride.
        m: [K, R], fp32, any strides.

    Returns:
        [parts, T, R], fp32: their sum is the product.

    Raises:
        ValueError: strides or sizes do not fit.
    """
    if x.stride(1) != 1 or x.shape[1] != m.shape[0]:
        raise ValueError(f"rows of {tuple(x.shape)}, {x.stride()} and a matrix {tuple(m.shape)} do not fit")
    (rows, width), rank = x.shape, m.shape[1]
    tile, block = _tiles.pick("adapters_project", x, width), max(16, min(WIDEST, next_power_of_2(rank)))
    parts = 2 if width >= 1024 else 1
    out = torch.empty(parts, rows, rank, dtype=torch.float32, device=x.device)
    launch(
        project_kernel,
        (triton.cdiv(rows, tile.rows), parts, triton.cdiv(rank, block)),
        *(x, m, out, rows),
        x.stride(0),
        **dict(WIDTH=width, RANK=rank, K_STRIDE=m.stride(0), R_STRIDE=m.stride(1), PARTS=parts),
        **dict(ROWS=tile.rows, STEP=tile.step, BLOCK=block, num_warps=tile.num_warps),
        num_stages=tile.num_stages,
    )
    return out


@triton.jit
def reduce_kernel(
    x,
    u,
    out,
    rows,
    length,
    x_stride,
    u_stride,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    N_STRIDE: tl.constexpr,
    R_STRIDE: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of columns, part of the rows, block of the adapters' columns)."""
    column = tl.program_id(0) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    r = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    total = tl.zeros((COLUMN_BLOCK, BLOCK), dtype=tl.float32)
    for begin in range(part * length, min(rows, (part + 1) * length), STEP):
        row = (begin + tl.arange(0, STEP)).to(tl.int64)
        mine = row < rows
        wide = tl.load(
            x + row[None, :] * x_stride + column[:, None], mask=mine[None, :] & (column < COLUMNS)[:, None], other=0.0
        )
        narrow = tl.load(u + row[:, None] * u_stride + r[None, :], mask=mine[:, None] & (r < RANK)[None, :], other=0.0)
        total += _times(wide, narrow)
    out += part * COLUMNS * RANK + column[:, None] * N_STRIDE + r[None, :] * R_STRIDE
    tl.store(out, total, mask=(column < COLUMNS)[:, None] & (r < RANK)[None, :])


def reduce(x, u, *, turned=False):
    """Parts of x^T u, of which each is the sum over some of the rows.

    Args:
        x: [T, N], bf16, unit column stride.
        u: [T, R], fp32, unit column stride.
        turned: whether the parts are of u^T x.

    Returns:
        [parts, N, R], fp32: their sum is the product; [parts, R, N] where ``turned``.

    Raises:
        ValueError: strides or sizes do not fit.
    """
    if x.stride(1) != 1 or u.stride(1) != 1 or x.shape[0] != u.shape[0]:
        raise ValueError(f"{tuple(x.shape)}, {x.stride()} and {tuple(u.shape)}, {u.stride()} do not fit")
    (rows, columns), rank = x.shape, u.shape[1]
    tile, block = _tiles.pick("adapters_reduce", x, columns), max(16, min(WIDEST, next_power_of_2(rank)))
    shape = (rank, columns) if turned else (columns, rank)
    out = torch.empty(PARTS, *shape, dtype=torch.float32, device=x.device)
    launch(
        reduce_kernel,
        (triton.cdiv(columns, tile.block), PARTS, triton.cdiv(rank, block)),
        *(x, u, out, rows),
        *(triton.cdiv(triton.cdiv(rows, PARTS), tile.step) * tile.step, x.stride(0), u.stride(0)),
        **dict(COLUMNS=columns, RANK=rank, N_STRIDE=1 if turned else rank, R_STRIDE=columns if turned else 1),
        **dict(COLUMN_BLOCK=tile.block, STEP=tile.step, BLOCK=block, num_warps=tile.num_warps),
        num_stages=tile.num_stages,
    )
    return out
