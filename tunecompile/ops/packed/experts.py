"""Products of few rows with packed stacks of experts' matrices, as a step of a rollout has them.

Of many experts a token has a few. Dequantising the stack reads and writes all of them.
"""

from collections.abc import Sequence
from typing import Optional

from torch import Tensor

from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.experts import few_rows
from tunecompile.ops.experts.grouped_linear import grouped_lora_linear
from tunecompile.ops.nf4 import dequantize_4bit
from tunecompile.ops.packed.mxfp4 import BLOCK, dequantize_mxfp4
from tunecompile.templates.few_rows.limits import LEAST_STEP


def refuse_packed(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    offsets: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    bias: Tensor | None,
    rows: int,
    blocksize: int,
) -> Note | None:
    """Return why the template does not multiply by this stack, or None. The arguments are those of `packed_experts`."""
    if reason := few_rows.refuse(x, rows, offsets.shape[0], a, b, bias) or refuse_gpu(packed, absmax, made=x.dtype):
        return reason
    if x.shape[1] % blocksize or (blocksize % LEAST_STEP and blocksize != BLOCK):
        return note("arguments-not-supported")
    aligned = packed.is_contiguous() and packed.storage_offset() % 16 == 0 and absmax.is_contiguous()
    return None if aligned else note("not-contiguous", "codes and scales are")


@op(cost=Cost.MATMUL, flops=lambda x, packed, *_: 2 * x.numel() * packed.shape[0])
def packed_experts(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    absmax_code: Optional[Tensor],
    absmax_scale: Optional[Tensor],
    absmax_offset: Optional[Tensor],
    offsets: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    bias: Optional[Tensor],
    rows: int,
    blocksize: int,
    quant_type: str,
) -> Tensor:
    """Return y of `grouped_lora_linear` with a packed stack [E, rows, K] (arXiv:2211.15841). It has no backward.

    Args:
        x: [S, K], sorted by expert; any floating dtype.
        packed: uint8, the codes of E * rows rows: as for `tunecompile.ops.nf4.dequantize_4bit`, or of MXFP4 for
            `tunecompile.ops.packed.mxfp4.dequantize_mxfp4`.
        absmax: the scales of blocks, or MXFP4's exponents.
        absmax_code: of double quantisation, or None; so are the next two.
        absmax_scale: one a 256 blocks.
        absmax_offset: one element.
        offsets: [E], int32 or int64: where the rows of each expert end. This and a, b, scales and bias: as for
            `tunecompile.ops.experts.grouped_linear.grouped_lora_linear`.
        rows: N, of each expert.
        blocksize: weights a block; 32 of MXFP4.
        quant_type: "nf4", "fp4" or "mxfp4".

    Returns:
        [S, rows] in x's dtype, 0 in rows of no expert.
    """
    shape = (offsets.shape[0] * rows, x.shape[1])
    if quant_type == "mxfp4":
        weight = dequantize_mxfp4.reference(packed, absmax, *shape, x.dtype)
    else:
        nested = (absmax_code, absmax_scale, absmax_offset)
        weight = dequantize_4bit.reference(packed, absmax, *nested, *shape, blocksize, quant_type, x.dtype)
    stack = weight.reshape(offsets.shape[0], rows, x.shape[1])
    return grouped_lora_linear.reference(x, stack, offsets, a, b, scales, False, bias)[0]


@packed_experts.provider("few_rows", because=few_rows.BECAUSE, refuses=refuse_packed)
def _(*, x, packed, absmax, absmax_code, absmax_scale, absmax_offset, offsets, a, b, scales, bias, rows, **form):
    from tunecompile.templates.nf4 import Weight

    weight = Weight(packed, absmax, absmax_code, absmax_scale, absmax_offset, offsets.shape[0] * rows)
    return few_rows.product(x, weight, offsets, a, b, scales, bias, **form)[0]
