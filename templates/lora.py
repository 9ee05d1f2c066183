"""Small pieces put beside or below a large matrix, in place, so that one product reads them together.

They are those of low-rank adapters (Hu et al., 2021, arXiv:2106.09685): [X | XA] [W | s B]^T = X W^T + s XA B^T, in
one accumulator."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._launch import launch, next_power_of_2

__all__ = ["append_columns", "append_rows", "write_beside", "write_pieces"]


@triton.jit
def append_rows_kernel(source, out, row0, source_stride, n_columns, LDO: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    value = tl.load(source + row * source_stride + column, mask=mask)
    tl.store(out + (row0 + row) * LDO + column, value.to(out.dtype.element_ty), mask=mask)


def append_rows(source, out, row):
    """Copy rows into a matrix: LoRA's A below W, so that one product with [dY | dY B] gives the whole dX.

    Args:
        source: [r, K], any dtype, unit column stride.
        out: [*, LDO >= K], any dtype, unit column stride. Rows from ``row`` on are written, in its dtype; columns
            behind K stay.
        row: the first.

    Raises:
        ValueError: strides or sizes do not fit.
    """
    _check(source, out, row + source.shape[0], source.shape[1])
    block = 1024
    launch(
        append_rows_kernel,
        (source.shape[0], triton.cdiv(source.shape[1], block)),
        *(source, out, row),
        *(source.stride(0), source.shape[1]),
        **dict(LDO=out.stride(0), BLOCK=block, num_warps=4),
    )


@triton.jit
def append_columns_kernel(
    source,
    out,
    column0,
    rows,
    width,
    source_stride,
    COLUMNS: tl.constexpr,
    COLUMNS_POW2: tl.constexpr,
    LDO: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS_POW2)
    mask = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    value = tl.load(source + row[:, None] * source_stride + column[None, :], mask=mask, other=0.0)
    inside = (row < rows)[:, None] & (column0 + column < width)[None, :]
    tl.store(out + row[:, None] * LDO + column0 + column[None, :], value.to(out.dtype.element_ty), mask=inside)


def append_columns(source, out, column):
    """Copy columns into a matrix: XA beside X, or dY B beside dY. The columns behind are zeroed.

    Args:
        source: [T, r], any dtype, unit column stride.
        out: [T or more, LDO], any dtype, unit column stride. Its first T rows are written, in its dtype.
        column: the first; column + r is LDO at most.

    Raises:
        ValueError: strides or sizes do not fit.
    """
    _check(source, out, source.shape[0], column + source.shape[1])
    rows = 64
    launch(
        append_columns_kernel,
        (triton.cdiv(source.shape[0], rows),),
        *(source, out, column),
        *(source.shape[0], out.shape[1], source.stride(0)),
        **dict(COLUMNS=source.shape[1], COLUMNS_POW2=next_power_of_2(out.shape[1] - column)),
        **dict(LDO=out.stride(0), ROWS=rows, num_warps=4),
    )


@triton.jit
def write_beside_kernel(
    left,
    right,
    out,
    left_stride,
    right_stride,
    COLUMNS: tl.constexpr,
    EXTRA: tl.constexpr,
    LDO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(left + row * left_stride + column, mask=column < COLUMNS, other=0.0)
    extra = tl.load(
        right + row * right_stride + column - COLUMNS, mask=(column >= COLUMNS) & (column < COLUMNS + EXTRA), other=0.0
    )
    tl.store(out + row * LDO + column, tl.where(column < COLUMNS, value, extra.to(value.dtype)), mask=column < LDO)


def write_beside(left, right, out):
    """[left | right | 0] into the first rows of ``out``, all of its columns.

    What ``out`` held is overwritten, so one buffer serves piece after piece of a long batch, and no piece begins
    before the last is read.

    Args:
        left: [T, K], in the dtype of ``out``, unit column stride.
        right: [T, r], any dtype, unit column stride.
        out: [T or more, LDO >= K + r], contiguous.

    Raises:
        ValueError: strides or sizes do not fit.
    """
    _check(left, out, left.shape[0], left.shape[1] + right.shape[1])
    _check(right, out, left.shape[0], left.shape[1] + right.shape[1])
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, not of strides {out.stride()}")
    block = 1024
    launch(
        write_beside_kernel,
        (left.shape[0], triton.cdiv(out.shape[1], block)),
        *(left, right, out),
        *(left.stride(0), right.stride(0)),
        **dict(COLUMNS=left.shape[1], EXTRA=right.shape[1], LDO=out.stride(0), BLOCK=block, num_warps=4),
    )


def _check(source, out, rows, columns):
    if source.stride(1) != 1:
        raise ValueError(f"source must have unit column stride, not {source.stride()}")
    if out.stride(1) != 1 or out.shape[0] < rows or out.shape[1] < columns:
        raise ValueError(f"out {tuple(out.shape)}, strides {out.stride()}, cannot hold {rows} x {columns}")


@triton.jit
def write_pieces_kernel(table, factors, SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    """Program (piece, block of its elements).

    table: addresses of source and target, rows, columns and both row strides of each piece.
    """
    piece = tl.program_id(0)
    table += piece.to(tl.int64) * 6
    source = tl.load(table).to(tl.pointer_type(SOURCE))
    target = tl.load(table + 1).to(tl.pointer_type(TARGET))
    columns = tl.load(table + 3)
    elements = tl.load(table + 2) * columns
    source_stride = tl.load(table + 4)
    target_stride = tl.load(table + 5)
    factor = tl.load(factors + piece)
    for start in range(tl.program_id(1) * BLOCK, elements, tl.num_programs(1) * BLOCK):
        element = start + tl.arange(0, BLOCK).to(tl.int64)
        row = element // columns
        column = element % columns
        mask = element < elements
        value = tl.load(source + row * source_stride + column, mask=mask).to(tl.float32) * factor
        tl.store(target + row * target_stride + column, value.to(TARGET), mask=mask)


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def write_pieces(pieces):
    """What writes ``target[...] = source * factor`` for many small matrices, by one launch for each pair of ``DTYPES``.

    Args:
        pieces: (source, target, factor) each: two matrices [n, k] on the same device, bf16, fp16 or fp32, of unit
            column strides, and a number. Their memory must stay where it is.

    Returns:
        A function without arguments, to be called as often as sources change. It computes in fp32 and rounds once.

    Raises:
        ValueError: strides or sizes do not fit.
    """
    groups, launches = {}, []
    for source, target, factor in pieces:
        _check(source, target, *source.shape)
        groups.setdefault((source.dtype, target.dtype), []).append((source, target, factor))
    for (source_dtype, target_dtype), group in groups.items():
        rows = [(s.data_ptr(), t.data_ptr(), *s.shape, s.stride(0), t.stride(0)) for s, t, _ in group]
        table = torch.tensor(rows, dtype=torch.int64, device=group[0][1].device)
        factors = torch.tensor([factor for *_, factor in group], dtype=torch.float32, device=table.device)
        launches.append((len(group), table, factors, DTYPES[source_dtype], DTYPES[target_dtype]))

    def run():
        for count, table, factors, source, target in launches:
            launch(
                write_pieces_kernel, (count, 8), table, factors, SOURCE=source, TARGET=target, BLOCK=1024, num_warps=4
            )

    return run
