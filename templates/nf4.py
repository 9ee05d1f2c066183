"""NF4 (and FP4) weights to bf16, fp16 or fp32, bit-equal to bitsandbytes, at memory speed.

Format (QLoRA, https://arxiv.org/abs/2305.14314, as bitsandbytes stores it): weights in row-major order, two a byte,
the even element in the high nibble; each block of ``blocksize`` elements has one fp32 ``absmax`` with
``w = code[nibble] * absmax``. Double-quantised, absmax is a uint8 and the fp32 value is
``absmax_code[absmax] * absmax_scale[block // 256] + absmax_offset``, the product rounded before the sum.

A naive kernel is limited by the lookup instead of memory: with a tree of 15 selects per weight the ALUs reach about
half the memory rate. Here the 16 codes are in shared memory (16 banks, so no conflicts) and a lookup is one load
(``tl.gather``). A thread takes one 32-bit word, 8 weights, so that loads are 4 and stores 16 coalesced bytes a
thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from . import _tiles
from ._launch import is_aligned, launch, next_power_of_2
from ._nf4_kernel import dequantize_kernel

__all__ = ["Adapter", "Weight", "dequantize", "dequantize_siblings"]


SIBLINGS = 3  #: weights a launch
NESTED_BLOCK = 256  #: blocks that share a ``scale`` of double quantisation
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
    row=0,
    tile=None,
):
    """Dequantise weights that share their input, below each other, three in a launch (arXiv:2305.14314).

    Args:
        weights: of one format: all double-quantised, or none.
        k: columns of each.
        out: [*, LDO >= k], bf16, fp16 or fp32, unit column stride. Rows from ``row`` on are written, columns 0..k of
            them.
        adapters: one a weight, or none. With them all columns of ``out`` are written: [W | 0 | factor * B | 0], so
            that [X | XA | 0] times its transpose is the adapted product. Without, columns behind k stay as they are.
        blocksize: weights a block.
        quant_type: "nf4" or "fp4".
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
            *(some, theirs, k, out, row, tile, per_word, blocksize),
            *(_is_fp4(quant_type), out.shape[1] - k if adapters else 0),
        )
        row += sum(w.rows for w in some)


def _start(weights, adapters, k, out, row, tile, per_word, blocksize, fp4, ranks):
    arguments, ranked, main, extra = [], {}, [0], [0]
    for i in range(SIBLINGS):
        adapter = adapters[i] if i < len(adapters) else None
        b, factor, first = adapter or (None, 1.0, 0)
        if i < len(weights):
            w = weights[i]
            _check(w.packed, w.absmax, w.code)
            if b is not None and (b.shape[0] != w.rows or b.stride(1) != 1 or first + b.shape[1] > ranks):
                raise ValueError(
                    f"B {tuple(b.shape)}, strides {b.stride()}, does not fit {w.rows} rows "
                    f"and {ranks} rank columns from {first}"
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
        **dict(K=k, LDO=out.stride(0), BLOCKSIZE=blocksize, ABSMAX_BLOCK=NESTED_BLOCK),
        **dict(NESTED=weights[0].code is not None, FP4=fp4, RANKS=ranks),
        RANKS_POW2=next_power_of_2(max(ranks, 1)),
        **ranked,
        **dict(COUNT=len(weights), PER_WORD=per_word, BLOCK=tile.block, EXTRA_ROWS=EXTRA_ROWS),
        **dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
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
    tile=None,
):
    """One packed weight, bit-equal to bitsandbytes' (arXiv:2305.14314).

    Args:
        packed: uint8. This and absmax, absmax_code, absmax_scale and absmax_offset: as ``packed``, ``absmax``,
            ``code``, ``scale`` and ``offset`` of ``Weight``.
        shape: [N, K] of the weight.
        dtype: bf16, fp16 or fp32.
        blocksize: weights a block.
        quant_type: "nf4" or "fp4".
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
