"""Products grouped by expert (arXiv:2211.15841), with the adapters' term in the same accumulator.

Rows are sorted by expert, and `offsets` holds the end of each expert's rows; rows behind the last offset belong to no
expert. Rows may be read by an index, so that no copy sorted by expert is needed. An additional group holds the rows of
no expert: its tiles are zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, next_power_of_2

__all__ = ["collect", "outer", "rows", "tiles", "zero_behind", "zero_idle"]

FIELDS = 4  #: of a tile: its expert, its first row, the end of the expert's rows; and one to stay aligned
NARROW = 64  #: a product of at most so many columns is an adapter's, and limited by reading rows


@triton.jit
def tile_of(tile, starts, ends, rows, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """The group of a tile of rows, its first row, and where the group's rows end. Behind the last tile is no group.

    starts, ends: offsets before and of each group, [GROUPS]. (Who calls it loads them: torch would take memory that a
    function is given for memory that its results point to.)
    """
    group = tl.arange(0, GROUPS)
    starts, ends = starts.to(tl.int32), tl.where(group == EXPERTS, rows, ends.to(tl.int32))
    counts = tl.where(group <= EXPERTS, (ends - starts + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(counts, 0)
    mine = tl.sum((upto <= tile).to(tl.int32), 0)
    here = group == mine
    first = tl.sum(tl.where(here, starts + (tile - upto + counts) * ROWS, 0), 0)
    return mine, first, tl.sum(tl.where(here, ends, 0), 0)


@triton.jit
def tiles_kernel(offsets, out, rows, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Program: a tile. The tiles after the last one in use have no group."""
    tile, number = tl.program_id(0), tl.arange(0, GROUPS)
    ends = tl.load(offsets + number, mask=number < EXPERTS, other=0)
    starts = tl.load(offsets + number - 1, mask=(number > 0) & (number <= EXPERTS), other=0)
    group, first, end = tile_of(tile, starts, ends, rows, EXPERTS, GROUPS, ROWS)
    tl.store(out + tile * 4, group)
    tl.store(out + tile * 4 + 1, first)
    tl.store(out + tile * 4 + 2, end)


def tiles(offsets, rows, like):
    """The rows of each tile of a product.

    Args:
        offsets: [E], int32 or int64: where the rows of each expert end, in increasing order.
        rows: their number, including those of no expert.
        like: a tensor of the product's dtype and device.

    Returns:
        [tiles, 4], int32: group (E: rows of no expert; more: no rows), first row, end of the group's rows, unused.
    """
    experts, tile = offsets.shape[0], _tiles.pick("experts", like, 0)
    count = triton.cdiv(rows, tile.rows) + experts + 1
    out = torch.empty(count, FIELDS, dtype=torch.int32, device=offsets.device)
    launch(
        tiles_kernel,
        (count,),
        *(offsets, out, rows),
        **dict(EXPERTS=experts, GROUPS=next_power_of_2(experts + 1), ROWS=tile.rows, num_warps=4),
    )
    return out


@triton.jit
def rows_kernel(
    x,
    order,
    weight,
    inner,
    up,
    bias,
    table,
    out,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    N_STRIDE: tl.constexpr,
    CHOICES: tl.constexpr,
    RANK: tl.constexpr,
    BIASED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program: a tile of rows, and BLOCK columns. Tiles of the same rows are adjacent programs, so rows are in L2."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    table += tl.program_id(0) // blocks * 4
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    group = tl.load(table)
    if group <= EXPERTS:
        end = tl.load(table + 2)
        row = tl.load(table + 1) + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        if group < EXPERTS:
            # Rows and columns behind the end are replaced by valid ones, and not stored: the loop needs no masks.
            # (The compiler knows that a remainder is contiguous; of `tl.where` it does not.)
            safe = tl.minimum(row, end - 1).to(tl.int64)
            there = column % COLUMNS
            source = safe
            if CHOICES:
                source = (tl.load(order + safe) // CHOICES).to(tl.int64)
            k = tl.arange(0, STEP)
            lefts = x + source[:, None] * X_STRIDE + k[None, :]
            rights = weight + group.to(tl.int64) * COLUMNS * WIDTH + k[:, None] * K_STRIDE + there[None, :] * N_STRIDE
            for begin in range(0, WIDTH, STEP):
                if WIDTH % STEP == 0:
                    left = tl.load(lefts)
                    right = tl.load(rights)
                else:
                    left = tl.load(lefts, mask=(begin + k < WIDTH)[None, :], other=0.0)
                    right = tl.load(rights, mask=(begin + k < WIDTH)[:, None], other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
                lefts += STEP
                rights += STEP * K_STRIDE
            # 16 at a time. With 32, Triton 3.6 reads shared memory that it has not allocated if the loop above has a
            # single iteration (an illegal access on an H100).
            for begin in tl.static_range(0, RANK, 16):
                r = begin + tl.arange(0, 16)
                left = tl.load(inner + safe[:, None] * RANK + r[None, :])
                adapter = up + group.to(tl.int64) * RANK * COLUMNS
                right = tl.load(adapter + r[:, None] * COLUMNS + there[None, :])
                total = tl.dot(left, right, total, input_precision="ieee")
            if BIASED:
                total += tl.load(bias + group.to(tl.int64) * COLUMNS + there)[None, :].to(tl.float32)
        places = out + row[:, None].to(tl.int64) * COLUMNS + column[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < COLUMNS)[None, :])


def rows(x, weight, offsets, table, count, *, turned, order=None, choices=0, inner=None, up=None, bias=None):
    """Each row times the matrix of its expert, plus adapters and bias; 0 in rows of no expert.

    Args:
        x: [S, K], or [T, K] with an order; fp32, fp16 or bf16, unit column stride.
        weight: [E, N, K] where ``turned``, else [E, K, N]; in x's dtype, contiguous.
        offsets: [E]: where the rows of each expert end.
        table: the result of ``tiles`` for these offsets and ``like=x``.
        count: S.
        turned: whether the matrices are transposed.
        order: [S], int64: row s is row order[s] // choices of x. None: row s.
        choices: rows per row of x.
        inner, up: [S, R] and [E, R, N], in x's dtype, contiguous, R a power of two of at least 16: inner_s up_e is
            added before the result is rounded.
        bias: [E, N], any floating dtype, contiguous: added before the result is rounded.

    Returns:
        [S, N] in x's dtype.

    Raises:
        ValueError: strides or sizes do not fit.
    """
    width, columns = weight.shape[1], weight.shape[2]
    if turned:
        width, columns = columns, width
    contiguous = all(t is None or t.is_contiguous() for t in (weight, inner, up, bias))
    rank = 0 if inner is None else inner.shape[1]
    if x.stride(1) != 1 or x.shape[1] != width or not contiguous or rank & (rank - 1) or 0 < rank < 16:
        raise ValueError(f"rows of {tuple(x.shape)}, {x.stride()} and matrices {tuple(weight.shape)} do not fit")
    out = torch.empty(count, columns, dtype=x.dtype, device=x.device)
    wide = _tiles.pick("experts", x, columns)
    tile = _tiles.pick("experts_narrow", x, columns) if columns <= NARROW else wide
    block = max(16, min(tile.block, next_power_of_2(columns)))
    step = max(16, min(tile.step, next_power_of_2(width)))
    launch(
        rows_kernel,
        (table.shape[0] * triton.cdiv(columns, block),),
        *(x, order, weight, inner, up, bias, table, out),
        **dict(COLUMNS=columns, WIDTH=width, X_STRIDE=x.stride(0), K_STRIDE=1 if turned else columns),
        **dict(N_STRIDE=width if turned else 1, CHOICES=0 if order is None else choices, RANK=rank),
        **dict(BIASED=bias is not None, EXPERTS=offsets.shape[0], ROWS=wide.rows, BLOCK=block, STEP=step),
        **dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return out


@triton.jit
def outer_kernel(
    left,
    right,
    order,
    offsets,
    out,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    CHOICES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (block of columns, expert): rows in order, so that the sum is reproducible."""
    expert = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    start = 0
    if expert > 0:
        start = tl.load(offsets + expert - 1).to(tl.int32)
    end = tl.load(offsets + expert).to(tl.int32)
    total = tl.zeros((BLOCK, RANK), dtype=tl.float32)
    for begin in range(start, end, STEP):
        row = begin + tl.arange(0, STEP)
        mine = (row < end)[:, None]
        source = row.to(tl.int64)
        if CHOICES:
            source = tl.load(order + row, mask=row < end, other=0).to(tl.int64) // CHOICES
        wide = tl.load(
            right + source[:, None] * STRIDE + column[None, :], mask=mine & (column < COLUMNS)[None, :], other=0.0
        )
        narrow = tl.load(left + row[:, None].to(tl.int64) * RANK + r[None, :], mask=mine, other=0.0)
        total = tl.dot(tl.trans(wide), narrow, total, input_precision="ieee")
    out += expert.to(tl.int64) * RANK * COLUMNS + r[None, :] * COLUMNS + column[:, None]
    tl.store(out, total.to(out.dtype.element_ty), mask=(column < COLUMNS)[:, None])


def outer(left, right, offsets, *, order=None, choices=0):
    """The sum of outer products of each expert's rows: gradients of adapters; 0 for experts without rows.

    Args:
        left: [S, R], contiguous, R a power of two of at least 16; fp32, fp16 or bf16.
        right: [S, N], or [T, N] with an order, in left's dtype, unit column stride.
        offsets: [E]: where the rows of each expert end.
        order, choices: row s of right is row order[s] // choices, as for ``rows``.

    Returns:
        [E, R, N] in left's dtype, summed in fp32.

    Raises:
        ValueError: strides do not fit.
    """
    rank = left.shape[1]
    if not left.is_contiguous() or right.stride(1) != 1 or rank & (rank - 1) or rank < 16:
        raise ValueError(f"{tuple(left.shape)} of strides {left.stride()}, and strides {right.stride()} do not fit")
    experts, columns = offsets.shape[0], right.shape[1]
    tile = _tiles.pick("experts_outer", left, rank)
    block = max(16, min(tile.block, next_power_of_2(columns)))
    out = torch.empty(experts, rank, columns, dtype=left.dtype, device=left.device)
    launch(
        outer_kernel,
        (triton.cdiv(columns, block), experts),
        *(left, right, order, offsets, out),
        **dict(COLUMNS=columns, STRIDE=right.stride(0), CHOICES=0 if order is None else choices, RANK=rank),
        **dict(BLOCK=block, STEP=tile.step, num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return out


@triton.jit
def collect_kernel(
    y, places, out, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(places + token * CHOICES + choice)
        total += tl.load(y + row * STRIDE + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(out + token * COLUMNS + column, total.to(out.dtype.element_ty), mask=column < COLUMNS)


def collect(y, places, choices, dtype):
    """The sum of each token's rows, in the order of its choices, in fp32.

    Args:
        y: [T * choices, N], fp32, fp16 or bf16, unit column stride.
        places: [T * choices], int64: the row of y of each choice.
        choices: rows a token.
        dtype: of the result.

    Returns:
        [T, N].

    Raises:
        ValueError: strides do not fit.
    """
    if y.stride(1) != 1:
        raise ValueError(f"y must have unit column stride, not {y.stride()}")
    columns = y.shape[1]
    out = torch.empty(places.shape[0] // choices, columns, dtype=dtype, device=y.device)
    tile = _tiles.pick("experts_collect", y, columns)
    block = min(tile.block, next_power_of_2(columns))
    launch(
        collect_kernel,
        (out.shape[0], triton.cdiv(columns, block)),
        *(y, places, out),
        **dict(COLUMNS=columns, STRIDE=y.stride(0), CHOICES=choices, BLOCK=block, num_warps=tile.num_warps),
    )
    return out


@triton.jit
def zero_idle_kernel(offsets, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (part, expert)."""
    expert = tl.program_id(1)
    start = 0
    if expert > 0:
        start = tl.load(offsets + expert - 1).to(tl.int32)
    end = tl.load(offsets + expert).to(tl.int32)
    if end <= start:
        out += expert.to(tl.int64) * SIZE
        for begin in range(tl.program_id(0) * BLOCK, SIZE, tl.num_programs(0) * BLOCK):
            element = begin + tl.arange(0, BLOCK)
            tl.store(out + element, tl.zeros((BLOCK,), dtype=out.dtype.element_ty), mask=element < SIZE)


def zero_idle(out: torch.Tensor, offsets: torch.Tensor) -> None:
    """Set the matrices of experts without rows to 0, in place. Most programs read two offsets and end.

    Args:
        out: [E, M, N], contiguous, any dtype.
        offsets: [E], int32 or int64: where the rows of each expert end.

    Raises:
        ValueError: it is not contiguous, or there are not as many offsets.
    """
    if not out.is_contiguous() or out.shape[0] != offsets.shape[0]:
        raise ValueError(f"{tuple(out.shape)} of strides {out.stride()} and {offsets.shape[0]} offsets do not fit")
    size = out.shape[1] * out.shape[2]
    launch(zero_idle_kernel, (16, out.shape[0]), offsets, out, SIZE=size, BLOCK=1024, num_warps=4)


@triton.jit
def zero_behind_kernel(
    offsets, out, rows, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program: a tile of rows."""
    last = tl.load(offsets + EXPERTS - 1).to(tl.int32)
    first = tl.program_id(0) * ROWS
    if first + ROWS > last:
        for index in range(0, ROWS):
            row = first + index
            if (row >= last) & (row < rows):
                for begin in range(0, COLUMNS, BLOCK):
                    column = begin + tl.arange(0, BLOCK)
                    value = tl.zeros((BLOCK,), dtype=out.dtype.element_ty)
                    tl.store(out + row.to(tl.int64) * COLUMNS + column, value, mask=column < COLUMNS)


def zero_behind(out: torch.Tensor, offsets: torch.Tensor) -> None:
    """Set rows behind the last offset to 0, in place. Most programs read the offset and end.

    Args:
        out: [S, N], contiguous, any dtype.
        offsets: [E], int32 or int64: where the rows of each expert end.

    Raises:
        ValueError: it is not contiguous.
    """
    if not out.is_contiguous():
        raise ValueError(f"rows must be contiguous, not of strides {out.stride()}")
    tile = {"COLUMNS": out.shape[1], "ROWS": 64, "BLOCK": min(1024, next_power_of_2(out.shape[1]))}
    grid = (triton.cdiv(out.shape[0], tile["ROWS"]),)
    launch(zero_behind_kernel, grid, offsets, out, out.shape[0], EXPERTS=offsets.shape[0], **tile, num_warps=4)
