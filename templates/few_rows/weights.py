"""Rows of a weight times rows of x: one function for each format that a weight is stored in, behind one signature."""

from __future__ import annotations

import triton
import triton.language as tl

from .unpack import levels_of

__all__ = ["DENSE", "MXFP4", "times_rows"]

DENSE = tl.constexpr("dense")
MXFP4 = tl.constexpr("mxfp4")


@triton.jit
def times_rows(
    n,  # [TILE], rows of the weight
    x,
    at,  # int64 [1, ROWS], where rows begin in x
    there,  # [1, ROWS], whether they do
    weight,  # packed or dense, absmax or exponents, and code, scale and offset of double quantisation
    begin,
    tables,
    K: tl.constexpr,
    LENGTH: tl.constexpr,  # columns from `begin` on
    FORMAT: tl.constexpr,
    N_STRIDE: tl.constexpr,  # of a dense weight
    K_STRIDE: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    PERMUTE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,  # columns at once, 64 or 128
    ROWS: tl.constexpr,
):
    """The product of LENGTH columns, fp32 [TILE, ROWS]."""
    if FORMAT == DENSE:
        return _dense(n, x, at, there, weight[0], begin, LENGTH, N_STRIDE, K_STRIDE, TILE, STEP, ROWS)
    elif FORMAT == MXFP4:
        return _mxfp4(n, x, at, there, weight[0], weight[1], begin, tables, K, LENGTH, PERMUTE, TILE, STEP, ROWS)
    else:
        return _by_blocks(
            *(n, x, at, there, weight, begin, tables, K, LENGTH, FORMAT, BLOCKSIZE, ABSMAX_BLOCK, NESTED, PERMUTE),
            *(TILE, STEP, ROWS),
        )


@triton.jit
def _dense(
    n,
    x,
    at,
    there,
    matrix,
    begin,
    LENGTH: tl.constexpr,
    N_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    k = begin + tl.arange(0, STEP)
    matrix += n[:, None].to(tl.int64) * N_STRIDE + k[None, :].to(tl.int64) * K_STRIDE
    x += at + k[:, None]
    total = tl.zeros([TILE, ROWS], tl.float32)
    for _ in range(0, LENGTH, STEP):
        total = tl.dot(tl.load(matrix), tl.load(x, mask=there, other=0.0), total, input_precision="ieee")
        matrix += STEP * K_STRIDE
        x += STEP
    return total


@triton.jit
def _words(packed, n, K: tl.constexpr, STEP: tl.constexpr):
    """Where the words of eight codes of each row are, [TILE, STEP / 8]."""
    words = packed.to(tl.pointer_type(tl.int32), bitcast=True)
    return words + n[:, None].to(tl.int64) * (K // 8) + tl.arange(0, STEP // 8)[None, :]


@triton.jit
def _operands(levels, dtype: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr):
    """The first and the second 64 columns (or the only ones, twice) in the order of the product's columns.

    levels: [TILE, words, e, h, j]; two words are a thread's.
    """
    if STEP == 64:
        levels = tl.reshape(levels.to(dtype), [TILE, 4, 2, 2, 2, 2])
        whole = tl.reshape(tl.permute(levels, (0, 2, 5, 4, 1, 3)), [TILE, 64])
        return whole, whole
    else:
        levels = tl.reshape(levels.to(dtype), [TILE, 2, 4, 2, 2, 2, 2])
        return tl.split(tl.reshape(tl.permute(levels, (0, 3, 6, 5, 2, 4, 1)), [TILE, 64, 2]))


@triton.jit
def _scale(
    absmax,
    code,
    outer,
    offset,
    block,
    NESTED: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    ONE_SCALE: tl.constexpr,
):
    """The fp32 scales of blocks. outer: of double quantisation, one a row if ONE_SCALE; else where they are."""
    value = tl.load(absmax + block)
    if NESTED:
        value = tl.load(code + value.to(tl.int32))
        factor = outer if ONE_SCALE else tl.load(outer + block // ABSMAX_BLOCK)
        return value * factor + tl.load(offset)
    else:
        return value.to(tl.float32)


@triton.jit
def _by_blocks(
    n,
    x,
    at,
    there,
    weight,
    begin,
    tables,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    PERMUTE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Levels of bitsandbytes: each block's scale multiplies its sums."""
    packed, absmax, code, scale, offset = weight
    words = _words(packed, n, K, STEP)
    BLOCKS: tl.constexpr = K // BLOCKSIZE  # of a row
    block = n * BLOCKS  # 32 bits reach 2^37 weights
    ONE_SCALE: tl.constexpr = NESTED and ABSMAX_BLOCK % BLOCKS == 0  # for all blocks of a row
    outer = tl.load(scale + block // ABSMAX_BLOCK) if ONE_SCALE else scale
    x += at + tl.arange(0, 64)[:, None]
    total = tl.zeros([TILE, ROWS], tl.float32)
    for k in range(begin, begin + LENGTH, STEP):
        levels = levels_of(tl.load(words + k // 8), *tables, FORMAT, PERMUTE)
        x0 = tl.load(x + k, mask=there, other=0.0)
        x1 = tl.load(x + k + 64, mask=there, other=0.0) if STEP == 128 else x0
        w0, w1 = _operands(levels, x0.dtype, TILE, STEP)
        first = block + k // BLOCKSIZE
        s0 = _scale(absmax, code, outer, offset, first, NESTED, ABSMAX_BLOCK, ONE_SCALE)
        s1 = s0
        if STEP == 128 and BLOCKSIZE == 64:
            s1 = _scale(absmax, code, outer, offset, first + 1, NESTED, ABSMAX_BLOCK, ONE_SCALE)
        total += s0[:, None] * tl.dot(w0, x0)
        if STEP == 128:
            total += s1[:, None] * tl.dot(w1, x1)
    return total


@triton.jit
def _mxfp4(
    n,
    x,
    at,
    there,
    packed,
    exponents,
    begin,
    tables,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    PERMUTE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of 32 is shorter than what a thread has: levels are multiplied by its power of two, which is exact."""
    words = _words(packed, n, K, STEP)
    exponents += n[:, None].to(tl.int64) * (K // 32) + (tl.arange(0, STEP // 8) // 4)[None, :]
    x += at + tl.arange(0, 64)[:, None]
    total = tl.zeros([TILE, ROWS], tl.float32)
    for k in range(begin, begin + LENGTH, STEP):
        levels = levels_of(tl.load(words + k // 8), *tables, MXFP4, PERMUTE)
        exponent = tl.load(exponents + k // 32).to(tl.int16)
        power = tl.where(exponent == 0, 0x40, exponent << 7).to(tl.int16)  # 2^-127 is a subnormal
        power = power.to(tl.bfloat16, bitcast=True)[:, :, None, None, None]
        if not PERMUTE:  # Triton's interpreter multiplies bf16 by their bits
            levels, power = levels.to(tl.float32), power.to(tl.float32)
        x0 = tl.load(x + k, mask=there, other=0.0)
        w0, w1 = _operands(levels * power, x0.dtype, TILE, STEP)
        total = tl.dot(w0, x0, total)
        if STEP == 128:
            total = tl.dot(w1, tl.load(x + k + 64, mask=there, other=0.0), total)
    return total
