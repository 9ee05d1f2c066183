"""Operands of matrix products in 8 bits, FP8 (e4m3: 4 significant bits, +-448; arXiv:2209.05433) and INT8 (+-127).

``A @ B^T`` runs on tensor cores with A: [T, C] and B: [N, C] in 8 bits and one fp32 scale a row of each. In FP8 an
adapter's term ``P @ Q^T`` (P: [T, R], Q: [N, R]) uses additional columns of the same product. Rounding it to 4 bits
would be too inexact, so each of its values v is the sum of two e4m3 numbers, high = e4m3(v) and low = e4m3(v - high)
(as Dekker, 1971, https://doi.org/10.1007/BF01397083, splits a double), and three of the four products are kept:
``[high P | low P | high P] @ [high Q | high Q | low Q]^T``, good to about 8 bits, which bf16 has. A row's scale covers
its adapter columns as well, so nothing saturates. (``int8_product`` adds the term of an adapter to INT8's sums.)

Rows are padded with zeros to a width that tensor cores support. The frozen weight is written in either direction: as
[N, K] for x W^T, and transposed to [K, N] for dY W (both operands of such a product must be contiguous along the
dimension that is summed over)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, next_power_of_2
from ._nf4_kernel import block_scale, code_value
from .nf4 import NESTED_BLOCK

__all__ = ["begin_weight", "quantize_rows", "write_dense", "write_nf4"]

LARGEST = tl.constexpr(448.0)
INTEGERS = tl.constexpr(127.0)
TINY = tl.constexpr(1e-30)  # a row of zeros has a scale too


@triton.jit
def _rounded(v):
    """``v`` (fp32, |v| <= 448) rounded to the nearest e4m3 number, ties to even, as fp32.

    (In Triton 3.6 the cast from e4m3 gives wrong values for the fifth and sixth of eight elements of a thread.)
    """
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(
        tl.float32, bitcast=True
    )  # three bits of the fraction are kept
    shift = 24576.0  # 1.5 * 2^14: adding it rounds to 2^-9, the spacing of e4m3's subnormal numbers
    return tl.where(tl.abs(v) < 0.015625, (v + shift) - shift, normal)


@triton.jit
def _converted(v, dtype: tl.constexpr):
    """``v`` (fp32, within the range of ``dtype``) rounded to the nearest e4m3 number or integer, ties to even."""
    if dtype == tl.int8:
        shift = 12582912.0  # 1.5 * 2^23: adding it rounds to integers
        v = (v + shift) - shift
    return v.to(dtype)


@triton.jit
def _store_split(v, out, column, mask, RANKS: tl.constexpr, WEIGHT: tl.constexpr):
    """high, low and high again of ``v`` (a weight's: high, high, low), RANKS columns each."""
    rounded = _rounded(v)
    high = rounded.to(tl.float8e4nv)
    low = (v - rounded).to(tl.float8e4nv)
    tl.store(out + column, high, mask=mask)
    tl.store(out + RANKS + column, high if WEIGHT else low, mask=mask)
    tl.store(out + 2 * RANKS + column, low if WEIGHT else high, mask=mask)


@triton.jit
def quantize_kernel(
    x,
    extra,
    factors,
    out,
    scales,
    x_stride,
    extra_stride,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    PADDING: tl.constexpr,
    PADDING_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column, rank = tl.arange(0, BLOCK), tl.arange(0, RANKS_POW2)
    v = tl.load(x + row * x_stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    if factors is not None:
        v = v * tl.load(factors + column, mask=column < COLUMNS, other=0.0)
    largest = tl.max(tl.abs(v))
    if RANKS > 0:
        e = tl.load(extra + row * extra_stride + rank, mask=rank < RANKS, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(e)))
    if out.dtype.element_ty == tl.int8:
        scale = tl.maximum(largest, TINY) / INTEGERS
        tl.store(scales + row, scale + tl.sum(v * 0.0))  # not a number, where one of the row is none: integers all are
    else:
        scale = tl.maximum(largest, TINY) / LARGEST
        tl.store(scales + row, scale)
    inverse = 1.0 / scale
    out += row * (COLUMNS + 3 * RANKS + PADDING)
    tl.store(out + column, _converted(v * inverse, out.dtype.element_ty), mask=column < COLUMNS)
    if RANKS > 0:
        _store_split(e * inverse, out + COLUMNS, rank, rank < RANKS, RANKS, False)
    if PADDING > 0:
        pad = tl.arange(0, PADDING_POW2)
        tl.store(
            out + COLUMNS + 3 * RANKS + pad,
            tl.zeros([PADDING_POW2], tl.float32).to(out.dtype.element_ty),
            mask=pad < PADDING,
        )


def quantize_rows(x, extra, width, dtype=torch.float8_e4m3fn, factors=None, *, tile=None):
    """Activations, or gradients, as the left operand of a product in 8 bits, in FP8 with an adapter's columns.

    Args:
        x: [T, C], any floating dtype, unit column stride.
        extra: [T, R], any floating dtype, unit column stride; or None, as for INT8.
        width: columns of the result, at least C + 3 R.
        dtype: e4m3 or int8.
        factors: fp32 [C], by which columns are multiplied first; or None.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        ([x | extra, split | 0] in ``dtype``: [T, width], the rows' scales: fp32 [T, 1]). A row that holds a value that
        is no number, or none finite, gives none: its scale is none in int8.

    Raises:
        ValueError: strides or width do not fit.
    """
    (rows, columns), ranks = x.shape, 0 if extra is None else extra.shape[1]
    if x.stride(1) != 1 or (extra is not None and extra.stride(1) != 1) or width < columns + 3 * ranks:
        raise ValueError(f"x has strides {x.stride()}; {columns} columns and 3 x {ranks} ranks go into {width}")
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    tile = tile or _tiles.pick("eight_bits_quantize", x, columns)
    padding = width - columns - 3 * ranks
    launch(
        quantize_kernel,
        (rows,),
        *(x, extra, factors, out, scales),
        *(x.stride(0), 0 if extra is None else extra.stride(0)),
        **dict(COLUMNS=columns, RANKS=ranks, RANKS_POW2=next_power_of_2(max(ranks, 1)), PADDING=padding),
        **dict(PADDING_POW2=next_power_of_2(max(padding, 1)), BLOCK=next_power_of_2(columns)),
        **dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return out, scales


@triton.jit
def adapter_kernel(
    adapter,
    largest,
    out,
    scales,
    n_rows,
    row_stride,
    rank_stride,
    COLUMN: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    PADDING: tl.constexpr,
    PADDING_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS_POW2)
    inside = row < n_rows
    bound = tl.maximum(tl.load(largest), TINY) + tl.zeros([BLOCK], tl.float32)
    if RANKS > 0:
        mask = inside[:, None] & (rank < RANKS)[None, :]
        v = tl.load(adapter + row[:, None] * row_stride + rank[None, :] * rank_stride, mask=mask, other=0.0).to(
            tl.float32
        )
        bound = tl.maximum(bound, tl.max(tl.abs(v), 1))
    scale = bound / LARGEST
    tl.store(scales + row, scale, mask=inside)
    out += row[:, None] * (COLUMN + 3 * RANKS + PADDING) + COLUMN
    if RANKS > 0:
        _store_split(v / scale[:, None], out, rank[None, :], mask, RANKS, True)
    if PADDING > 0:
        pad = tl.arange(0, PADDING_POW2)
        zero = tl.zeros([BLOCK, PADDING_POW2], tl.float32).to(tl.float8e4nv)
        tl.store(out + 3 * RANKS + pad[None, :], zero, mask=inside[:, None] & (pad < PADDING)[None, :])


def begin_weight(largest, adapter, rows, columns, width, *, tile=None):
    """Make the right operand of an FP8 product without the weight.

    ``write_*`` writes the weight to the first columns, divided by its row's scale.

    Args:
        largest: fp32, one element, at least the size of any weight.
        adapter: [rows, R], any floating dtype, any strides; or None.
        rows: of the operand.
        columns: that the weight takes.
        width: columns of the operand, at least columns + 3 R.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        (out: e4m3 [rows, width], whose columns from ``columns`` on hold the adapter, split, and zeros; scales: fp32
        [1, rows])."""
    ranks = 0 if adapter is None else adapter.shape[1]
    out = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=largest.device)
    scales = torch.empty((1, rows), dtype=torch.float32, device=largest.device)
    tile = tile or _tiles.pick("fp8_adapter", out, rows)
    padding = width - columns - 3 * ranks
    launch(
        adapter_kernel,
        (triton.cdiv(rows, tile.block),),
        *(adapter, largest, out, scales, rows),
        *((0, 0) if adapter is None else adapter.stride()),
        **dict(COLUMN=columns, RANKS=ranks, RANKS_POW2=next_power_of_2(max(ranks, 1)), PADDING=padding),
        **dict(PADDING_POW2=next_power_of_2(max(padding, 1)), BLOCK=tile.block, num_warps=tile.num_warps),
    )
    return out, scales


@triton.jit
def dense_kernel(
    weight,
    scales,
    out,
    n_rows,
    n_columns,
    row_stride,
    column_stride,
    row0,
    column0,
    WIDTH: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    v = tl.load(weight + row[:, None] * row_stride + column[None, :] * column_stride, mask=mask, other=0.0).to(
        tl.float32
    )
    if BY_COLUMN:
        v = v * (1.0 / tl.load(scales + column0 + column, mask=column < n_columns, other=1.0))[None, :]
    else:
        v = v * (1.0 / tl.load(scales + row0 + row, mask=row < n_rows, other=1.0))[:, None]
    where = (row0 + row)[:, None] * WIDTH + (column0 + column)[None, :]
    tl.store(out + where, _converted(v, out.dtype.element_ty), mask=mask)


def write_dense(weight, scales, out, row=0, column=0, *, by_column=False, tile=None):
    """Put a plain weight into an operand, such as ``begin_weight`` made.

    Args:
        weight: [n, k], any floating dtype, any strides (so transposed too).
        scales: fp32, as many as ``out`` has rows, by which these are divided.
        out: e4m3 or int8 [rows, width], contiguous. Written from (row, column) on.
        row: the first of the rows that are written.
        column: the first of the columns that are written.
        by_column: whether ``scales`` has one for each column of ``out`` that is used, in the place of rows.
        tile: a ``_tiles.Tile`` in place of the table's.
    """
    tile = tile or _tiles.pick("eight_bits_dense", out, weight.numel())
    rows, columns = weight.shape
    launch(
        dense_kernel,
        (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.block)),
        *(weight, scales, out, rows, columns),
        *weight.stride(),
        *(row, column),
        **dict(WIDTH=out.stride(0), BY_COLUMN=by_column, ROWS=tile.rows, COLUMNS=tile.block),
        num_warps=tile.num_warps,
    )


@triton.jit
def nf4_kernel(
    packed,
    absmax,
    absmax_code,
    absmax_scale,
    absmax_offset,
    scales,
    out,
    n_rows,
    row0,
    column0,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    FP4: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of the weight, ROWS x COLUMNS; eight codes a 32-bit word, as in ``_nf4_kernel.dequantize_kernel``."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    word = (n[:, None] * (K // 8) + at[None, :]).to(tl.uint32)  # reaches 2^34 weights
    mask = (n < n_rows)[:, None] & (at < K // 8)[None, :]
    bits = tl.load(packed.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=mask, other=0)
    j = tl.arange(0, 8)
    nibble = (
        bits[:, :, None] >> (8 * (j // 2) + 4 * (1 - j % 2))[None, None, :]
    ) & 15  # little-endian bytes, high nibble first
    scale = block_scale(
        absmax, absmax_code, absmax_scale, absmax_offset, word // (BLOCKSIZE // 8), mask, NESTED, ABSMAX_BLOCK
    )
    value = tl.gather(code_value(tl.arange(0, 16), FP4), tl.reshape(nibble, [ROWS * COLUMNS]), 0)
    value = tl.reshape(tl.reshape(value, [ROWS, COLUMNS // 8, 8]) * scale[:, :, None], [ROWS, COLUMNS])
    inside = (n < n_rows)[:, None] & (k < K)[None, :]
    if TRANSPOSED == BY_COLUMN:
        first = column0 if TRANSPOSED else row0
        value = value * (1.0 / tl.load(scales + first + n, mask=n < n_rows, other=1.0))[:, None]
    else:
        first = row0 if TRANSPOSED else column0
        value = value * (1.0 / tl.load(scales + first + k, mask=k < K, other=1.0))[None, :]
    value = _converted(value, out.dtype.element_ty)
    if TRANSPOSED:
        where = (row0 + k).to(tl.int64)[:, None] * WIDTH + (column0 + n)[None, :]
        tl.store(out + where, tl.trans(value), mask=tl.trans(inside))
    else:
        where = (row0 + n).to(tl.int64)[:, None] * WIDTH + (column0 + k)[None, :]
        tl.store(out + where, value, mask=inside)


def write_nf4(
    packed,
    absmax,
    shape,
    scales,
    out,
    row=0,
    column=0,
    *,
    transposed=False,
    by_column=False,
    blocksize=64,
    quant_type="nf4",
    absmax_code=None,
    absmax_scale=None,
    absmax_offset=None,
    tile=None,
):
    """Put a 4-bit weight, or its transpose, into an operand, without conversion to bf16.

    Args:
        packed: uint8, contiguous, starts at a multiple of 4 bytes. This and absmax, blocksize, quant_type,
            absmax_code, absmax_scale and absmax_offset: as for ``nf4.dequantize``.
        shape: [N, K] of the weight; 8 divides K.
        scales: fp32, as many as ``out`` has rows, by which these are divided.
        out: e4m3 or int8 [rows, width], contiguous. Written from (row, column) on.
        row: the first of the rows that are written.
        column: the first of the columns that are written.
        transposed: whether [K, N] is written.
        by_column: whether ``scales`` has one for each column of ``out`` that is used, in the place of rows.
        tile: a ``_tiles.Tile`` in place of the table's.

    Raises:
        ValueError: 8 does not divide K.
    """
    n, k = shape
    if k % 8:
        raise ValueError(f"eight weights are read at a time, and 8 does not divide {k}")
    tile = tile or _tiles.pick("eight_bits_nf4_transposed" if transposed else "eight_bits_nf4", out, n * k)
    launch(
        nf4_kernel,
        (triton.cdiv(n, tile.rows), triton.cdiv(k, tile.block)),
        *(packed, absmax, absmax_code, absmax_scale, absmax_offset, scales, out, n, row, column),
        **dict(K=k, WIDTH=out.stride(0), BLOCKSIZE=blocksize, ABSMAX_BLOCK=NESTED_BLOCK),
        **dict(NESTED=absmax_code is not None, FP4=quant_type == "fp4", TRANSPOSED=transposed),
        **dict(BY_COLUMN=by_column, ROWS=tile.rows, COLUMNS=tile.block, num_warps=tile.num_warps),
    )
