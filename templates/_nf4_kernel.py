"""The kernel of `nf4.py`: unpacks up to three weights in a launch, and writes their adapters beside them."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_scale", "code_value", "dequantize_kernel"]


@triton.jit
def _select4(i, a, b, c, d):
    return tl.where((i & 2) != 0, tl.where((i & 1) != 0, d, c), tl.where((i & 1) != 0, b, a))


@triton.jit
def code_value(i, FP4: tl.constexpr):
    """The level of nibble ``i`` (int32 tensor) as fp32, from the constants of bitsandbytes' tables."""
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
def block_scale(
    absmax, absmax_code, absmax_scale, absmax_offset, block, mask, NESTED: tl.constexpr, ABSMAX_BLOCK: tl.constexpr
):
    """The fp32 scales of blocks ``block``, decoded where they are double-quantised (``NESTED``)."""
    if NESTED:
        code = tl.load(absmax_code + tl.load(absmax + block, mask=mask, other=0).to(tl.int32))
        scale = tl.load(absmax_scale + block // ABSMAX_BLOCK, mask=mask, other=0.0)
        # fma(a, b, 0) is the rounded product, which no compiler may contract with the sum that follows.
        return tl.fma(code, scale, tl.zeros_like(code)) + tl.load(absmax_offset)
    else:
        return tl.load(absmax + block, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _write_weights(
    pid,
    weight,  # packed, absmax, and code, scale and offset of the latter
    out,
    row0,
    n_words,
    K: tl.constexpr,
    LDO: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    FP4: tl.constexpr,
    PER_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    packed, absmax, absmax_code, absmax_scale, absmax_offset = weight
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
    scale = block_scale(
        absmax, absmax_code, absmax_scale, absmax_offset, word // (BLOCKSIZE // PER_WORD), mask, NESTED, ABSMAX_BLOCK
    )
    table = code_value(tl.arange(0, 16), FP4)
    value = tl.reshape(tl.gather(table, tl.reshape(nibble, [BLOCK * PER_WORD]), 0), [BLOCK, PER_WORD])
    row = word // (K // PER_WORD)
    column = (word - row * (K // PER_WORD)) * PER_WORD
    start = (row0 + row).to(tl.int64) * LDO + column
    tl.store(out + start[:, None] + j[None, :], (value * scale[:, None]).to(out.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _write_ranks(
    pid,
    adapter,  # B and its stride
    out,
    row0,
    n_rows,
    K: tl.constexpr,
    LDO: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    RANK: tl.constexpr,
    RANK_OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
):
    b, stride_b = adapter
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
    packed0,
    absmax0,
    code0,
    scale0,
    offset0,
    b0,
    stride_b0,
    row0,
    rows0,
    words0,  # a weight, LoRA's B for it ([N, RANK], or None)
    packed1,
    absmax1,
    code1,
    scale1,
    offset1,
    b1,
    stride_b1,
    row1,
    rows1,
    words1,  # and up to two siblings
    packed2,
    absmax2,
    code2,
    scale2,
    offset2,
    b2,
    stride_b2,
    row2,
    rows2,
    words2,
    out,  # [*, LDO]; a weight's rows begin at its row
    main1,
    main2,
    main3,
    extra1,
    extra2,  # programs below main1 unpack the first weight, below main2 the second, ...
    K: tl.constexpr,
    LDO: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    ABSMAX_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    FP4: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    RANK0: tl.constexpr,
    FIRST0: tl.constexpr,
    FACTOR0: tl.constexpr,  # B's rank, its first column after K, its scale
    RANK1: tl.constexpr,
    FIRST1: tl.constexpr,
    FACTOR1: tl.constexpr,
    RANK2: tl.constexpr,
    FIRST2: tl.constexpr,
    FACTOR2: tl.constexpr,
    COUNT: tl.constexpr,
    PER_WORD: tl.constexpr,  # weights a word: 8 (int32 words), or 1 where 8 does not divide K
    BLOCK: tl.constexpr,  # words a program
    EXTRA_ROWS: tl.constexpr,  # rows a program of the second kind
):
    """Programs below ``main3`` unpack weights into columns 0..K; the others write [0 | FACTOR * B | 0] beside them."""
    pid = tl.program_id(0)
    weights = (
        (packed0, absmax0, code0, scale0, offset0),
        (packed1, absmax1, code1, scale1, offset1),
        (packed2, absmax2, code2, scale2, offset2),
    )
    first, words, ends = (row0, row1, row2), (words0, words1, words2), (0, main1, main2, main3)
    for i in tl.static_range(COUNT):
        if (pid >= ends[i]) & (pid < ends[i + 1]):
            _write_weights(
                *(pid - ends[i], weights[i], out, first[i], words[i]),
                *(K, LDO, BLOCKSIZE, ABSMAX_BLOCK, NESTED, FP4, PER_WORD, BLOCK),
            )
    if RANKS > 0:
        extra = pid - main3
        adapters, rows, begins = (
            ((b0, stride_b0), (b1, stride_b1), (b2, stride_b2)),
            (rows0, rows1, rows2),
            (0, extra1, extra2),
        )
        for i in tl.static_range(COUNT):
            mine = extra >= begins[i]
            if i < 2:
                mine = mine & (extra < begins[i + 1])
            if mine:
                _write_ranks(
                    *(extra - begins[i], adapters[i], out, first[i], rows[i], K, LDO, RANKS, RANKS_POW2),
                    *((RANK0, RANK1, RANK2)[i], (FIRST0, FIRST1, FIRST2)[i], (FACTOR0, FACTOR1, FACTOR2)[i]),
                    EXTRA_ROWS,
                )
