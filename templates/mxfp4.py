"""MXFP4 weights to bf16, fp16 or fp32, bit-equal to transformers', at memory speed.

Format (OCP Microscaling Formats 1.0, https://arxiv.org/abs/2310.10537): two E2M1 codes a byte, the even element in the
low nibble; each block of 32 elements has one byte, the exponent of its scale plus 127.

E2M1 is a prefix of fp16: sign, then exponent and mantissa bits in the same order. Shifted into place, a code is an fp16
number, 2^14 times too small for the other bias of its exponent; 0.5 is a subnormal in both. So a level takes two shifts
and a conversion instead of a lookup. A thread takes one 32-bit word, 8 weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import is_aligned, launch

__all__ = ["dequantize"]

BLOCK = 32  #: weights that share a scale


@triton.jit
def dequantize_kernel(packed, scales, out, words, BLOCK: tl.constexpr):
    """`BLOCK` words of 8 weights a program."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = word < words
    j = tl.arange(0, 8)
    bits = tl.load(packed.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=mask, other=0)
    nibble = (bits[:, None] >> (4 * j)[None, :]) & 15  # little-endian bytes, low nibble first
    level = (((nibble & 7) << 9) | ((nibble & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    exponent = tl.load(scales + word // 4, mask=mask, other=0).to(tl.int32)
    power = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)  # 2^-127 is a subnormal
    value = (level * 16384.0) * power[:, None]
    tl.store(out + (word * 8)[:, None] + j[None, :], value.to(out.dtype.element_ty), mask=mask[:, None])


def dequantize(packed, scales, shape, dtype, *, tile=None):
    """One packed weight, bit-equal to transformers' (OCP Microscaling Formats 1.0).

    Args:
        packed: uint8, rows * columns / 2 bytes of any shape, contiguous.
        scales: uint8, rows * columns / 32 of any shape, contiguous.
        shape: [rows, columns] of the weight; 32 divides columns.
        dtype: bf16, fp16 or fp32.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        [rows, columns] in ``dtype``.

    Raises:
        ValueError: dtypes, sizes or strides do not fit.
    """
    rows, columns = shape
    weights = rows * columns
    if packed.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"codes and scales must be uint8, not {packed.dtype} and {scales.dtype}")
    if not (packed.is_contiguous() and scales.is_contiguous()):
        raise ValueError("codes and scales must be contiguous")
    if columns % BLOCK or 2 * packed.numel() != weights or BLOCK * scales.numel() != weights:
        raise ValueError(f"{packed.numel()} bytes and {scales.numel()} scales are no weight {tuple(shape)}")
    if not is_aligned(packed, to=4):
        packed = packed.clone()
    out = torch.empty((rows, columns), dtype=dtype, device=packed.device)
    words = weights // 8
    tile = tile or _tiles.pick("mxfp4", out, words)
    launch(
        dequantize_kernel,
        (triton.cdiv(words, tile.block),),
        *(packed, scales, out, words),
        **dict(BLOCK=tile.block, num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return out
