"""NF4 (and FP4) weights to bf16, fp16 or fp32, bit-equal to bitsandbytes, at memory speed.

Format (QLoRA, https://arxiv.org/abs/2305.14314, as bitsandbytes stores it): weights in row-major order, two a byte,
the even element in the high nibble; each block of ``blocksize`` elements has one fp32 ``absmax`` with
``w = code[nibble] * absmax``. Double-quantised, absmax is a uint8 and the fp32 value is
``absmax_code[absmax] * absmax_scale[block // 256] + absmax_offset``, the product rounded before the sum.

What limits a naive kernel is not memory but the lookup: a tree of 15 selects a weight fills the ALUs at about half the
memory rate. Here the 16 codes lie in shared memory (16 banks, so no conflicts) and a lookup is one load (``tl.gather``).
A thread takes one 32-bit word, 8 weights, so that loads are 4 and stores 16 coalesced bytes a thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import is_aligned, launch, next_power_of_2


@triton.jit
def _select4(i, a, b, c, d):
    return tl.where((i & 2) != 0, tl.where((i & 1) != 0, d, c), tl.where((i & 1) != 0, b, a))


@triton.jit
def code_value(i, FP4: tl.constexpr):
    """The code of nibble ``i`` (int32 tensor) as fp32; constants of bitsandbytes' tables."""
    if FP4:  # sign, then 2 exponent bits and 1 mantissa bit, divided by the largest value, 12
        low = _select4(i, 0.0, 0.0625 / 12, 8.0 / 12, 1.0)
        high = _select4(i, 4.0 / 12, 0.5, 2.0 / 12, 0.25)
        size = tl.where((i & 4) != 0, high, low)
        return tl.where((i & 8) != 0, -size, size)
    else:
        a = _select4(i, -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
        b = _select4(i, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
        c = _select4(i, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
        d = _select4(i, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
        return tl.where((i & 8) != 0, tl.where((i & 4) != 0, d, c), tl.where((i & 4) != 0, b, a))


@triton.jit
def block_scale(absmax, absmax_code, absmax_scale, absmax_offset, block, mask,
                 NESTED: tl.constexpr, ABSMAX_BLOCK: tl.constexpr):
    if NESTED:
        code = tl.load(absmax_code + tl.load(absmax + block, mask=mask, other=0).to(tl.int32))
        scale = tl.load(absmax_scale + block // ABSMAX_BLOCK, mask=mask, other=0.0)
        # fma(a, b, 0) is the rounded product, which no compiler may contract with the sum that follows.
        return tl.fma(code, scale, tl.zeros_like(code)) + tl.load(absmax_offset)
    else:
        return tl.load(absmax + block, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _write_weights(pid, packed, absmax, absmax_code, absmax_scale, absmax_offset, out, row0, n_words,
                   K: tl.constexpr, LDO: tl.constexpr, BLOCKSIZE: tl.constexpr, ABSMAX_BLOCK: tl.constexpr,
                   NESTED: tl.constexpr, FP4: tl.constexpr, PER_WORD: tl.constexpr,
                   BLOCK: tl.constexpr):
    if PER_WORD == 8:
        word = (pid * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)  # 32 bits reach 2^34 weights; unsigned divides cheaper
    else:
        word = (pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint64)
    mask = word < n_words
    j = tl.arange(0, PER_WORD)
    if PER_WORD == 8:
        bits = tl.load(packed.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=mask, other=0)
        shift = 8 * (j // 2) + 4 * (1 - j % 2)  # little-endian bytes, high nibble first
        nibble = (bits[:, None] >> shift[None, :]) & 15
    else:
        bits = tl.load(packed + word // 2, mask=mask, other=0).to(tl.int32)
        nibble = ((bits >> (4 * (1 - word % 2)).to(tl.int32)) & 15)[:, None]
    scale = block_scale(absmax, absmax_code, absmax_scale, absmax_offset, word // (BLOCKSIZE // PER_WORD), mask,
                         NESTED, ABSMAX_BLOCK)
    table = code_value(tl.arange(0, 16), FP4)
    value = tl.reshape(tl.gather(table, tl.reshape(nibble, [BLOCK * PER_WORD]), 0), [BLOCK, PER_WORD])
    row = word // (K // PER_WORD)
    column = (word - row * (K // PER_WORD)) * PER_WORD
    start = (row0 + row).to(tl.int64) * LDO + column
    tl.store(out + start[:, None] + j[None, :], (value * scale[:, None]).to(out.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _write_ranks(pid, b, stride_b, out, row0, n_rows,
                 K: tl.constexpr, LDO: tl.constexpr, RANKS: tl.constexpr, RANKS_POW2: tl.constexpr, RANK: tl.constexpr,
                 RANK_OFFSET: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr):
    row = pid * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, RANKS_POW2)
    mask = (row < n_rows)[:, None] & (column < RANKS)[None, :]
    value = tl.zeros([ROWS, RANKS_POW2], tl.float32)
    if RANK > 0:
        inside = (column >= RANK_OFFSET) & (column < RANK_OFFSET + RANK)
        where = row.to(tl.int64)[:, None] * stride_b + (column - RANK_OFFSET)[None, :]
        value = tl.load(b + where, mask=mask & inside[None, :], other=0.0).to(tl.float32) * SCALE
    start = (row0 + row).to(tl.int64) * LDO + K
    tl.store(out + start[:, None] + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(
    packed, absmax, absmax_code, absmax_scale, absmax_offset, out,  # out: [*, LDO], rows from row0
    b, stride_b,  # LoRA's B: [N, RANK], or None
    row0, n_rows, n_words, main_programs,
    K: tl.constexpr, LDO: tl.constexpr,
    BLOCKSIZE: tl.constexpr, ABSMAX_BLOCK: tl.constexpr, NESTED: tl.constexpr, FP4: tl.constexpr,
    RANKS: tl.constexpr, RANKS_POW2: tl.constexpr, RANK: tl.constexpr, RANK_OFFSET: tl.constexpr, SCALE: tl.constexpr,
    PER_WORD: tl.constexpr,  # weights a word: 8 (int32 words), or 1 where 8 does not divide K
    BLOCK: tl.constexpr,  # words a program
    EXTRA_ROWS: tl.constexpr,  # rows a program of the second kind
):
    """Programs below ``main_programs`` unpack weights into columns 0..K; the others write [0 | SCALE * B | 0] beside them."""
    pid = tl.program_id(0)
    if RANKS == 0:
        _write_weights(pid, packed, absmax, absmax_code, absmax_scale, absmax_offset, out, row0, n_words,
                       K, LDO, BLOCKSIZE, ABSMAX_BLOCK, NESTED, FP4, PER_WORD, BLOCK)
    elif pid < main_programs:
        _write_weights(pid, packed, absmax, absmax_code, absmax_scale, absmax_offset, out, row0, n_words,
                       K, LDO, BLOCKSIZE, ABSMAX_BLOCK, NESTED, FP4, PER_WORD, BLOCK)
    else:
        _write_ranks(pid - main_programs, b, stride_b, out, row0, n_rows,
                     K, LDO, RANKS, RANKS_POW2, RANK, RANK_OFFSET, SCALE, EXTRA_ROWS)


def _start(packed, absmax, shape, out, row0, b, scale, rank_offset, ranks, *,
           blocksize, quant_type, absmax_code, absmax_scale, absmax_offset, absmax_blocksize, tile):
    n, k = shape
    per_word = 8 if k % 8 == 0 and is_aligned(packed, to=4) else 1
    n_words = n * k // per_word
    tile = tile or _tiles.pick("nf4", out, n_words)
    extra_rows = 64
    main = triton.cdiv(n_words, tile.block)
    extra = triton.cdiv(n, extra_rows) if ranks else 0
    launch(
        dequantize_kernel, (main + extra,),
        packed, absmax, absmax_code, absmax_scale, absmax_offset, out,
        b, 0 if b is None else b.stride(0),
        row0, n, n_words, main,
        K=k, LDO=out.stride(0),
        BLOCKSIZE=blocksize, ABSMAX_BLOCK=absmax_blocksize, NESTED=absmax_code is not None, FP4=_is_fp4(quant_type),
        RANKS=ranks, RANKS_POW2=next_power_of_2(max(ranks, 1)), RANK=0 if b is None else b.shape[1],
        RANK_OFFSET=rank_offset, SCALE=float(scale),
        PER_WORD=per_word, BLOCK=tile.block, EXTRA_ROWS=extra_rows,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )


def dequantize(packed, absmax, shape, dtype, *, blocksize=64, quant_type="nf4",
               absmax_code=None, absmax_scale=None, absmax_offset=None, absmax_blocksize=256,
               out=None, out_row_offset=0, tile=None):
    """The weight [N, K] = ``shape`` in ``dtype``.

    packed: uint8, N*K/2 bytes of any shape, contiguous. absmax: [ceil(N*K / blocksize)], fp32, or uint8 with absmax_code
    (fp32 [256]), absmax_scale (fp32 [ceil(blocks / absmax_blocksize)]) and absmax_offset (fp32, one element).
    out: a buffer [*, LDO >= K] of contiguous rows; the weight goes to rows ``out_row_offset``.. and columns 0..K of it, so
    siblings share one buffer; the other elements stay as they are. Returns that part of ``out``.
    """
    n, k = shape
    _check(packed, absmax, absmax_code)
    if out is None:
        out = torch.empty((out_row_offset + n, k), dtype=dtype, device=packed.device)
    _check_out(out, out_row_offset + n, k, dtype)
    _start(packed, absmax, (n, k), out, out_row_offset, None, 1.0, 0, 0, blocksize=blocksize, quant_type=quant_type,
           absmax_code=absmax_code, absmax_scale=absmax_scale, absmax_offset=absmax_offset,
           absmax_blocksize=absmax_blocksize, tile=tile)
    return out[out_row_offset:out_row_offset + n, :k]


def dequantize_extended(packed, absmax, shape, dtype, b, *, scale=1.0, rank_offset=0, ranks=None,
                        blocksize=64, quant_type="nf4",
                        absmax_code=None, absmax_scale=None, absmax_offset=None, absmax_blocksize=256,
                        out=None, out_row_offset=0, tile=None):
    """[W | 0 | scale * B | 0], [N, K + ranks]: one launch for the weight and LoRA's B (K extension: [X | XA] times this^T).

    b: [N, r], any float dtype, unit column stride, or None (only zeros). Its columns are ``rank_offset``.. of the ``ranks``
    (r when None) columns after K: siblings share one buffer, each with its own rank columns. Else as ``dequantize``.
    """
    n, k = shape
    _check(packed, absmax, absmax_code)
    rank = 0 if b is None else b.shape[1]
    ranks = rank_offset + rank if ranks is None else ranks
    if b is not None and (b.shape[0] != n or b.stride(1) != 1 or rank_offset + rank > ranks):
        raise ValueError(f"B {tuple(b.shape)}, strides {b.stride()}, does not fit {n} rows and {ranks} rank columns from {rank_offset}")
    if out is None:
        out = torch.empty((out_row_offset + n, k + ranks), dtype=dtype, device=packed.device)
    _check_out(out, out_row_offset + n, k + ranks, dtype)
    _start(packed, absmax, (n, k), out, out_row_offset, b, scale, rank_offset, ranks, blocksize=blocksize,
           quant_type=quant_type, absmax_code=absmax_code, absmax_scale=absmax_scale, absmax_offset=absmax_offset,
           absmax_blocksize=absmax_blocksize, tile=tile)
    return out[out_row_offset:out_row_offset + n, :k + ranks]


def _is_fp4(quant_type):
    if quant_type not in ("nf4", "fp4"):
        raise ValueError(f"quant_type must be 'nf4' or 'fp4', not {quant_type!r}")
    return quant_type == "fp4"


@triton.jit
def append_kernel(source, out, row0, source_stride, n_columns, LDO: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    value = tl.load(source + row * source_stride + column, mask=mask)
    tl.store(out + (row0 + row) * LDO + column, value.to(out.dtype.element_ty), mask=mask)


def append_rows(source, out, row):
    """Copy ``source`` [r, K] into rows ``row``.. of ``out`` [*, LDO >= K], cast to its dtype: LoRA's A below W, so that one
    product with [dY | dY B] gives the whole dX."""
    _check_out(out, row + source.shape[0], source.shape[1], out.dtype)
    if source.stride(1) != 1:
        raise ValueError(f"source must have unit column stride, not {source.stride()}")
    block = 1024
    launch(append_kernel, (source.shape[0], triton.cdiv(source.shape[1], block)), source, out, row, source.stride(0), source.shape[1],
           LDO=out.stride(0), BLOCK=block, num_warps=4)


def _check(packed, absmax, absmax_code):
    if packed.dtype != torch.uint8 or not packed.is_contiguous():
        raise ValueError(f"packed must be contiguous uint8, not {packed.dtype} with strides {packed.stride()}")
    if (absmax.dtype == torch.uint8) != (absmax_code is not None):
        raise ValueError(f"absmax is {absmax.dtype}: the three absmax_ arguments belong to uint8, and only to it")


def _check_out(out, rows, columns, dtype):
    if out.dtype != dtype or out.stride(1) != 1 or out.shape[0] < rows or out.shape[1] < columns:
        raise ValueError(f"out {tuple(out.shape)}, strides {out.stride()}, {out.dtype} cannot hold {rows} x {columns} of {dtype}")
