"""4-bit weights as bitsandbytes stores them: NF4 or FP4 codes, one scale a block (QLoRA, arXiv:2305.14314)."""

from typing import Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.known_bugs import BLOCKS_ACROSS_ROWS, DEQUANTIZED_IN_FP64
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.notes import Note, note

__all__ = ["CODES", "block_scales", "dequantize_4bit"]

#: the sixteen levels, by code. NF4: quantiles of a normal distribution; FP4: 1 sign, 2 exponent and 1 mantissa bits
CODES = {
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4": (
        0.0,
        0.0052083333,
        0.66666667,
        1.0,
        0.33333333,
        0.5,
        0.16666667,
        0.25,
        -0.0,
        -0.0052083333,
        -0.66666667,
        -1.0,
        -0.33333333,
        -0.5,
        -0.16666667,
        -0.25,
    ),
}


def _example(draw) -> list:
    rows, columns, block = 6, 192, 64
    scales = draw.normal(rows * columns // block, dtype=torch.float32).abs()
    return [draw.codes(rows * columns // 2, 1), scales, None, None, None, rows, columns, block, "nf4", draw.dtype]


@op(cost=Cost.POINTWISE, example=_example)
def dequantize_4bit(
    packed: Tensor,
    absmax: Tensor,
    absmax_code: Optional[Tensor],
    absmax_scale: Optional[Tensor],
    absmax_offset: Optional[Tensor],
    rows: int,
    columns: int,
    blocksize: int,
    quant_type: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return a weight from its 4-bit codes, with the values of bitsandbytes' own dequantisation (arXiv:2305.14314).

    It has no backward: such weights are frozen.

    Args:
        packed: uint8, of any shape with rows * columns / 2 elements: two codes a byte, high nibble first, in
            row-major order.
        absmax: fp32 [blocks], the scale of each block; with double quantisation its code, uint8 [blocks].
        absmax_code: of double quantisation: fp32 [256], or None. Block i has the scale
            `absmax_code[absmax[i]] * absmax_scale[i // 256] + absmax_offset`.
        absmax_scale: fp32 [ceil(blocks / 256)], or None.
        absmax_offset: fp32, one element, or None.
        rows: of the weight.
        columns: of the weight.
        blocksize: weights a block, 64 as a rule; it divides rows * columns.
        quant_type: "nf4" or "fp4", a key of `CODES`.
        dtype: floating, of the result.

    Returns:
        [rows, columns] in `dtype`, rounded once from fp32.
    """
    scale = block_scales(absmax, absmax_code, absmax_scale, absmax_offset)
    table = torch.tensor(CODES[quant_type], dtype=torch.float32, device=packed.device)
    flat = packed.reshape(-1)
    codes = torch.stack((flat >> 4, flat & 15), -1).reshape(-1, blocksize)
    return (table[codes.long()] * scale[:, None]).to(dtype).reshape(rows, columns)


def block_scales(absmax: Tensor, code: Optional[Tensor], scale: Optional[Tensor], offset: Optional[Tensor]) -> Tensor:
    """Return the scales of 4-bit blocks.

    Args:
        absmax: [blocks], fp32 scales, or their codes, uint8, if `code` is given.
        code: fp32 [256] of double quantisation, or None. So are scale, fp32 [ceil(blocks / 256)], and offset, fp32,
            one element.

    Returns:
        fp32 [blocks].
    """
    if code is None or scale is None or offset is None:
        return absmax.float()
    blocks = absmax.shape[0]
    outer = torch.arange(blocks, device=absmax.device) // 256
    return code[absmax.long()] * scale[outer] + offset


TEMPLATE = (
    "codes, scales and the codes of scales are read by one kernel: 0.045 ms, bitsandbytes' two 0.076 "
    "(14336x4096 bf16, H200)"
)
LEAST_BLOCK = 8  #: weights of a word, which the template reads at once


def _refuse_template(packed, absmax, absmax_code, blocksize, dtype) -> Note | None:
    if reason := refuse_gpu(packed, absmax, made=dtype):
        return reason
    if not packed.is_contiguous():
        return note("not-contiguous", "codes are")
    fits = (absmax.dtype == torch.uint8) == (absmax_code is not None) and blocksize % LEAST_BLOCK == 0
    return None if fits else note("arguments-not-supported")


@dequantize_4bit.provider("triton", because=TEMPLATE, refuses=_refuse_template)
def _(*, rows, columns, **packed):
    return templates.nf4.dequantize(shape=(rows, columns), **packed)


BITSANDBYTES = "its own kernel; generated code looks each level up in a table"


def _refuse_bitsandbytes(packed, columns, blocksize, dtype) -> Note | None:
    if not hasattr(torch.ops.bitsandbytes, "dequantize_4bit"):
        return note("bitsandbytes-not-loaded")
    if BLOCKS_ACROSS_ROWS.present and not on_gpu(packed) and columns % blocksize:
        return note("known-bug", BLOCKS_ACROSS_ROWS.package, str(BLOCKS_ACROSS_ROWS))
    if DEQUANTIZED_IN_FP64.present and not on_gpu(packed) and dtype == torch.float64:
        return note("known-bug", DEQUANTIZED_IN_FP64.package, str(DEQUANTIZED_IN_FP64))
    return None


@dequantize_4bit.provider("bitsandbytes", because=BITSANDBYTES, refuses=_refuse_bitsandbytes)
def _(packed, absmax, absmax_code, absmax_scale, absmax_offset, rows, columns, blocksize, quant_type, dtype):
    if absmax_code is not None:
        absmax = torch.ops.bitsandbytes.dequantize_blockwise.default(
            absmax, absmax_scale, absmax_code, 256, torch.float32
        )
        absmax = absmax + absmax_offset
    return torch.ops.bitsandbytes.dequantize_4bit.default(packed, absmax, blocksize, quant_type, [rows, columns], dtype)
