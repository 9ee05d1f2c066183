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

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import is_aligned, launch, next_power_of_2

__all__ = ["Adapter", "Weight", "dequantize", "dequantize_siblings"]


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
def block_scale(
    absmax, absmax_code, absmax_scale, absmax_offset, block, mask, NESTED: tl.constexpr, ABSMAX_BLOCK: tl.constexpr
):
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
    packed,
    absmax,
    absmax_code,
    absmax_scale,
    absmax_offset,
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
    b,
    stride_b,
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
    if pid < main1:
        _write_weights(
            pid,
            packed0,
            absmax0,
            code0,
            scale0,
            offset0,
            out,
            row0,
            words0,
            K,
            LDO,
            BLOCKSIZE,
            ABSMAX_BLOCK,
            NESTED,
            FP4,
            PER_WORD,
            BLOCK,
        )
    if COUNT > 1:
        if (pid >= main1) & (pid < main2):
            _write_weights(
                pid - main1,
                packed1,
                absmax1,
                code1,
                scale1,
                offset1,
                out,
                row1,
                words1,
                K,
                LDO,
                BLOCKSIZE,
                ABSMAX_BLOCK,
                NESTED,
                FP4,
                PER_WORD,
                BLOCK,
            )
    if COUNT > 2:
        if (pid >= main2) & (pid < main3):
            _write_weights(
                pid - main2,
                packed2,
                absmax2,
                code2,
                scale2,
                offset2,
                out,
                row2,
                words2,
                K,
                LDO,
                BLOCKSIZE,
                ABSMAX_BLOCK,
                NESTED,
                FP4,
                PER_WORD,
                BLOCK,
            )
    if RANKS > 0:
        extra = pid - main3
        if (extra >= 0) & (extra < extra1):
            _write_ranks(
                extra, b0, stride_b0, out, row0, rows0, K, LDO, RANKS, RANKS_POW2, RANK0, FIRST0, FACTOR0, EXTRA_ROWS
            )
        if COUNT > 1:
            if (extra >= extra1) & (extra < extra2):
                _write_ranks(
                    extra - extra1,
                    b1,
                    stride_b1,
                    out,
                    row1,
                    rows1,
                    K,
                    LDO,
                    RANKS,
                    RANKS_POW2,
                    RANK1,
                    FIRST1,
                    FACTOR1,
                    EXTRA_ROWS,
                )
        if COUNT > 2:
            if extra >= extra2:
                _write_ranks(
                    extra - extra2,
                    b2,
                    stride_b2,
                    out,
                    row2,
                    rows2,
                    K,
                    LDO,
                    RANKS,
                    RANKS_POW2,
                    RANK2,
                    FIRST2,
                    FACTOR2,
                    EXTRA_ROWS,
                )


SIBLINGS = 3  #: weights a launch
EXTRA_ROWS = 64


class Weight(NamedTuple):
    """A packed weight [rows, K], as bitsandbytes stores it. The last three tensors are those of double quantisation."""

    packed: torch.Tensor  #: uint8, rows * K / 2 bytes of any shape, contiguous
    absmax: torch.Tensor  #: [ceil(rows * K / blocksize)], fp32, or uint8 with ``code``
    code: torch.Tensor | None  #: fp32 [256]
    scale: torch.Tensor | None  #: fp32 [ceil(blocks / 256)]
    offset: torch.Tensor | None  #: fp32, one element
    rows: int  #: of the weight


class Adapter(NamedTuple):
    """LoRA's B, to be written beside a weight (Hu et al., 2021, arXiv:2106.09685)."""

    b: torch.Tensor  #: [rows, r], any floating dtype, unit column stride
    factor: float  #: of B
    first: int  #: where its columns begin, counted from K


def dequantize_siblings(
    weights: Sequence[Weight],
    k: int,
    out,
    adapters: Sequence[Adapter] = (),
    *,
    blocksize=64,
    quant_type="nf4",
    absmax_blocksize=256,
    row=0,
    tile=None,
):
    """Dequantise weights that share their input, below each other, one launch for three (Dettmers et al., 2023, arXiv:2305.14314).

    Args:
        weights: of one format: all double-quantised, or none.
        k: columns of each.
        out: [*, LDO >= k], bf16, fp16 or fp32, unit column stride. Rows from ``row`` on are written, columns 0..k of them.
        adapters: one a weight, or none. With them all columns of ``out`` are written: [W | 0 | factor * B | 0], so that [X | XA | 0] times
            its transpose is the adapted product. Without, columns behind k stay as they are.
        blocksize: weights a block.
        quant_type: "nf4" or "fp4".
        absmax_blocksize: blocks that share a ``scale`` of double quantisation.
        row: the first of the rows that are written.
        tile: a ``_tiles.Tile`` in place of the table's.

    Raises:
        ValueError: the quant_type is unknown, or dtypes, shapes or strides do not fit.
    """
    _check_out(out, row + sum(w.rows for w in weights), k)
    per_word = 8 if k % 8 == 0 and all(is_aligned(w.packed, to=4) for w in weights) else 1
    tile = tile or _tiles.pick("nf4", out, sum(w.rows for w in weights) * k // per_word)
    for start in range(0, len(weights), SIBLINGS):
        some, theirs = weights[start : start + SIBLINGS], adapters[start : start + SIBLINGS]
        _start(
            some,
            theirs,
            k,
            out,
            row,
            tile,
            per_word,
            blocksize,
            absmax_blocksize,
            _is_fp4(quant_type),
            out.shape[1] - k if adapters else 0,
        )
        row += sum(w.rows for w in some)


def _start(weights, adapters, k, out, row, tile, per_word, blocksize, absmax_blocksize, fp4, ranks):
    arguments, ranked, main, extra = [], {}, [0], [0]
    for i in range(SIBLINGS):
        adapter = adapters[i] if i < len(adapters) else None
        b, factor, first = adapter or (None, 1.0, 0)
        if i < len(weights):
            w = weights[i]
            _check(w.packed, w.absmax, w.code)
            if b is not None and (b.shape[0] != w.rows or b.stride(1) != 1 or first + b.shape[1] > ranks):
                raise ValueError(
                    f"B {tuple(b.shape)}, strides {b.stride()}, does not fit {w.rows} rows and {ranks} rank columns from {first}"
                )
            words = w.rows * k // per_word
            arguments += [
                w.packed,
                w.absmax,
                w.code,
                w.scale,
                w.offset,
                b,
                0 if b is None else b.stride(0),
                row,
                w.rows,
                words,
            ]
            row += w.rows
            main.append(main[-1] + triton.cdiv(words, tile.block))
            extra.append(extra[-1] + (triton.cdiv(w.rows, EXTRA_ROWS) if ranks else 0))
        else:
            arguments += [None] * 6 + [0] * 4
        ranked |= {f"RANK{i}": 0 if b is None else b.shape[1], f"FIRST{i}": first, f"FACTOR{i}": float(factor)}
    mains, extras = ([*ends, *[ends[-1]] * SIBLINGS][1 : SIBLINGS + 1] for ends in (main, extra))
    launch(
        dequantize_kernel,
        (main[-1] + extra[-1],),
        *arguments,
        out,
        *mains,
        *extras[:2],
        K=k,
        LDO=out.stride(0),
        BLOCKSIZE=blocksize,
        ABSMAX_BLOCK=absmax_blocksize,
        NESTED=weights[0].code is not None,
        FP4=fp4,
        RANKS=ranks,
        RANKS_POW2=next_power_of_2(max(ranks, 1)),
        **ranked,
        COUNT=len(weights),
        PER_WORD=per_word,
        BLOCK=tile.block,
        EXTRA_ROWS=EXTRA_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def dequantize(
    packed,
    absmax,
    shape,
    dtype,
    *,
    blocksize=64,
    quant_type="nf4",
    absmax_code=None,
    absmax_scale=None,
    absmax_offset=None,
    absmax_blocksize=256,
    tile=None,
):
    """One packed weight, bit-equal to bitsandbytes' (arXiv:2305.14314).

    Args:
        packed: uint8. This and absmax, absmax_code, absmax_scale and absmax_offset: as ``packed``, ``absmax``, ``code``, ``scale`` and
            ``offset`` of ``Weight``.
        shape: [N, K] of the weight.
        dtype: bf16, fp16 or fp32.
        blocksize: weights a block.
        quant_type: "nf4" or "fp4".
        absmax_blocksize: blocks that share an absmax_scale.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        [N, K] in ``dtype``.

    Raises:
        ValueError: the quant_type is unknown, or dtypes, shapes or strides do not fit.
    """
    n, k = shape
    out = torch.empty((n, k), dtype=dtype, device=packed.device)
    dequantize_siblings(
        [Weight(packed, absmax, absmax_code, absmax_scale, absmax_offset, n)],
        k,
        out,
        blocksize=blocksize,
        quant_type=quant_type,
        absmax_blocksize=absmax_blocksize,
        tile=tile,
    )
    return out


def _is_fp4(quant_type):
    if quant_type not in ("nf4", "fp4"):
        raise ValueError(f"quant_type must be 'nf4' or 'fp4', not {quant_type!r}")
    return quant_type == "fp4"


def _check(packed, absmax, absmax_code):
    if packed.dtype != torch.uint8 or not packed.is_contiguous():
        raise ValueError(f"packed must be contiguous uint8, not {packed.dtype} with strides {packed.stride()}")
    if (absmax.dtype == torch.uint8) != (absmax_code is not None):
        raise ValueError(f"absmax is {absmax.dtype}: the three absmax_ arguments belong to uint8, and only to it")


def _check_out(out, rows, columns):
    if out.stride(1) != 1 or out.shape[0] < rows or out.shape[1] < columns:
        raise ValueError(f"out {tuple(out.shape)}, strides {out.stride()}, cannot hold {rows} x {columns}")
