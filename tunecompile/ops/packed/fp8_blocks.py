"""E4M3 weights with one fp32 scale for each block of rows and columns, as DeepSeek-V3 ships them (arXiv:2412.19437)."""

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op

NAN = 0x7F  #: the code of no number, without its sign
HALF_BIAS = 256.0  #: 2 ^ (15 - 7): what the exponents of fp16 and E4M3 have as their zero


def _decoded(codes: Tensor) -> Tensor:
    """E4M3 codes in fp32, by way of fp16. Triton converts the dtype itself from compute capability 8.9 on alone."""
    wide = codes.to(torch.int16)
    half = ((wide & 0x7F) << 7 | (wide & 0x80) << 8).view(torch.float16)
    return torch.where((wide & NAN) == NAN, float("nan"), half.to(torch.float32) * HALF_BIAS)


@op(cost=Cost.POINTWISE)
def dequantize_fp8_blocks(
    codes: Tensor, scales: Tensor, block_rows: int, block_columns: int, dtype: torch.dtype
) -> Tensor:
    """Return weights from their E4M3 codes, with the values of transformers' own dequantisation (arXiv:2412.19437).

    It has no backward: such weights are frozen.

    Args:
        codes: uint8 [E, N, K]: the bits of E4M3 numbers.
        scales: fp32 [E, ceil(N / block_rows), ceil(K / block_columns)].
        block_rows: rows that share a scale; the last ones may be fewer.
        block_columns: columns that do.
        dtype: floating, of the result.

    Returns:
        [E, N, K] in `dtype`, rounded once from fp32.
    """
    row = torch.arange(codes.shape[1], device=codes.device) // block_rows
    column = torch.arange(codes.shape[2], device=codes.device) // block_columns
    return (_decoded(codes) * scales[:, row[:, None], column]).to(dtype)
