"""MXFP4 weights: E2M1 codes in blocks of 32, each with a power of two as its scale (OCP Microscaling Formats 1.0)."""

import math

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note

BLOCK = 32  #: weights that share a scale
#: the sixteen levels, by code: 1 sign, 2 exponent and 1 mantissa bits
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: scales by their exponent; 255 is no number in the format, and infinity here as in transformers
POWERS = (*(2.0 ** (exponent - 127) for exponent in range(255)), math.inf)


def _example(draw) -> list:
    rows, columns = 6, 96
    exponents = draw.codes(rows * columns // 32, upto=8) + 120
    return [draw.codes(rows * columns // 2), exponents, rows, columns, draw.dtype]


@op(cost=Cost.POINTWISE, example=_example)
def dequantize_mxfp4(packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a weight from its MXFP4 codes, with the values of transformers' own dequantisation (arXiv:2310.10537).

    It has no backward: such weights are frozen.

    Args:
        packed: uint8, of any shape with rows * columns / 2 elements: two codes a byte, low nibble first, in row-major
            order.
        scales: uint8, of any shape with rows * columns / 32 elements: the exponent of each block's scale, plus 127.
        rows: of the weight.
        columns: of the weight; 32 divides them.
        dtype: floating, of the result.

    Returns:
        [rows, columns] in `dtype`, rounded once from fp32. In bf16 and wider nothing is rounded.
    """
    table = torch.tensor(LEVELS, dtype=torch.float32, device=packed.device)
    flat = packed.reshape(-1)
    codes = torch.stack((flat & 15, flat >> 4), -1).reshape(-1, BLOCK)
    powers = torch.tensor(POWERS, dtype=torch.float32, device=packed.device)
    return (table[codes.long()] * powers[scales.reshape(-1, 1).long()]).to(dtype).reshape(rows, columns)


def _refuse(packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Note | None:
    if reason := refuse_gpu(packed, scales, made=dtype):
        return reason
    return None if packed.is_contiguous() and scales.is_contiguous() else note("not-contiguous", "codes and scales are")


@dequantize_mxfp4.provider("triton", refuses=_refuse, because="levels are decoded from their bits, without a table")
def _(packed, scales, rows, columns, dtype):
    return templates.mxfp4.dequantize(packed, scales, (rows, columns), dtype)
