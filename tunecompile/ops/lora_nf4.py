"""LoRA over 4-bit weights as one op: the dequantised weights live in one scratch buffer, and only while a product reads them.

(QLoRA: Dettmers et al., 2023, arXiv:2305.14314.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops import fp8
from tunecompile.ops.lora import (
    adapter_gradients,
    base_gradient,
    base_gradient_in_fp8,
    below,
    extends,
    finish,
    forward_in_fp8,
    lora_linear,
    padded,
    with_xa,
)
from tunecompile.ops.nf4 import BITSANDBYTES, dequantize_4bit

__all__ = ["lora_linear_nf4", "lora_linear_nf4_backward"]


def _arguments(packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype) -> list[tuple]:
    """What `dequantize_4bit` takes, for each weight."""
    nested = bool(code)
    return [
        (
            packed[i],
            absmax[i],
            code[i] if nested else None,
            scale[i] if nested else None,
            offset[i] if nested else None,
            n,
            columns,
            blocksize,
            quant_type,
            dtype,
        )
        for i, n in enumerate(rows)
    ]


def reference_weights(*args) -> list[Tensor]:
    return [dequantize_4bit.reference(*each) for each in _arguments(*args)]


def _refuse_bitsandbytes(
    packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype
) -> str | None:
    """Why its kernel does not dequantise all weights, if it does not."""
    args = _arguments(packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype)
    return next((reason for each in args if (reason := dequantize_4bit.refusals(each, None).get("bitsandbytes"))), None)


def _dequantized(*args) -> list[Tensor]:
    return [dequantize_4bit.choose(each).run(*each) for each in _arguments(*args)]


def _refuse(x: Tensor, packed: Sequence[Tensor]) -> Note | None:
    contiguous = all(p.is_contiguous() for p in packed)
    return refuse_gpu(x) or (None if contiguous else note("not-contiguous", "the packed weight is"))


def forward_flops(x, inputs, packed, *_) -> int:
    return 4 * (x.numel() // x.shape[-1]) * sum(p.numel() for p in packed)


@op(cost=Cost.MATMUL, flops=forward_flops)
def lora_linear_nf4(
    x: Tensor,
    inputs: Sequence[Tensor],
    packed: Sequence[Tensor],
    absmax: Sequence[Tensor],
    code: Sequence[Tensor],
    scale: Sequence[Tensor],
    offset: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    dtype: torch.dtype,
    rows: Sequence[int],
    blocksize: int,
    quant_type: str,
) -> tuple[Tensor, Tensor]:
    """`lora_linear` over weights that `dequantize_4bit` makes: W_i is [rows[i], K] in x's dtype (QLoRA, arXiv:2305.14314).

    Args:
        x: [..., K]. This and inputs, biases, a, b, scales and dtype: as for `tunecompile.ops.lora.lora_linear`.
        packed: one a weight, uint8 with rows[i] * K / 2 elements; all that follows as for `tunecompile.ops.nf4.dequantize_4bit`.
        absmax: one a weight: fp32 [blocks], or uint8 with double quantisation.
        code: one a weight, fp32 [256], with double quantisation; else empty.
        scale: one a weight, fp32 [ceil(blocks / 256)], or empty.
        offset: one a weight, fp32 of one element, or empty.
        rows: N_i, the rows of each weight.
        blocksize: weights a block, for all of them.
        quant_type: "nf4" or "fp4", for all of them.

    Returns:
        (y, xa), as `lora_linear`: [..., sum of rows] in x's dtype, and [T, sum of r_i] in `dtype`.
    """
    weights = reference_weights(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return lora_linear.reference(x, inputs, weights, biases, a, b, scales, dtype)


@lora_linear_nf4.provider(
    "k_extension",
    because="weights and adapters are dequantised to where one product for all siblings reads them",
    refuses=lambda x, inputs, packed, *_: _refuse(x, packed),
)
def _(x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type):
    """[x | xa] @ [W | scale B]^T: the dequantisation kernel writes W and scale B side by side, each sibling into its rows."""
    wide, xa = with_xa(x, inputs, a, dtype)
    y = (
        wide
        @ extended_weight(
            x, packed, absmax, code, scale, offset, b, scales, rows, x.shape[-1], blocksize, quant_type
        ).t()
    )
    return finish(y, x, biases), xa


def _siblings(packed, absmax, code, scale, offset, rows) -> list:
    from tunecompile.templates.nf4 import Weight

    blank = [None] * len(rows)
    return [Weight(*each) for each in zip(packed, absmax, code or blank, scale or blank, offset or blank, rows)]


def extended_weight(
    x, packed, absmax, code, scale, offset, b, scales, rows, columns, blocksize, quant_type, below=None
) -> Tensor:
    """[W | scale B | 0] in x's dtype, [sum(rows), padded(columns + sum of ranks)]; with more rows for `below` [*, columns], if given."""
    from tunecompile.templates import lora, nf4

    ranks = [m.shape[1] for m in b]
    extra = 0 if below is None else below.shape[0]
    out = torch.empty((sum(rows) + extra, padded(columns + sum(ranks))), dtype=x.dtype, device=x.device)
    adapters = [nf4.Adapter(m, s, sum(ranks[:i])) for i, (m, s) in enumerate(zip(b, scales))]
    nf4.dequantize_siblings(
        _siblings(packed, absmax, code, scale, offset, rows),
        columns,
        out,
        adapters,
        blocksize=blocksize,
        quant_type=quant_type,
    )
    if below is not None:
        lora.append_rows(below, out, sum(rows))
    return out


def stacked_weight(x, packed, absmax, code, scale, offset, below, rows, columns, blocksize, quant_type) -> Tensor:
    """[W; below] in x's dtype, [sum(rows) + rows of `below`, columns]."""
    from tunecompile.templates import lora, nf4

    extra = 0 if below is None else below.shape[0]
    out = torch.empty((sum(rows) + extra, columns), dtype=x.dtype, device=x.device)
    nf4.dequantize_siblings(
        _siblings(packed, absmax, code, scale, offset, rows), columns, out, blocksize=blocksize, quant_type=quant_type
    )
    if below is not None:
        lora.append_rows(below, out, sum(rows))
    return out


@lora_linear_nf4.provider(
    "bitsandbytes",
    because=BITSANDBYTES,
    refuses=lambda x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type: (
        _refuse_bitsandbytes(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    ),
)
def _(x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type):
    weights = _dequantized(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return lora_linear.choose((x, inputs, weights, biases, a, b, scales, dtype)).run(
        x, inputs, weights, biases, a, b, scales, dtype
    )


def refuse_fp8(x: Tensor, packed: Sequence[Tensor], rows: Sequence[int]) -> Note | None:
    if not all(p.is_contiguous() and p.storage_offset() % 4 == 0 for p in packed):
        return note("fp8-packed-weight")
    return fp8.refuse(x, rows)


@lora_linear_nf4.provider(
    "fp8",
    precision="fp8",
    because=fp8.BECAUSE,
    refuses=lambda x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, *_: refuse_fp8(
        x, packed, rows
    ),
)
def _(x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type):
    weight = operand_in_fp8(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return forward_in_fp8(x, inputs, weight, biases, a, b, scales, dtype)


def operand_in_fp8(packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype) -> fp8.Operand:
    """Codes to e4m3 with nothing in between; each sibling into its rows, or columns where the weight is transposed."""
    if not packed[0].is_cuda:
        return fp8.dense_operand(
            reference_weights(packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype)
        )
    from tunecompile.templates import fp8 as templates

    def make(adapter, transposed):
        shape = (columns, sum(rows)) if transposed else (sum(rows), columns)
        out, scales = templates.begin_weight(
            _largest(absmax, code, scale, offset), adapter, *shape, fp8.width_of(shape[1], adapter)
        )
        for i, n in enumerate(rows):
            nested = dict(absmax_code=code[i], absmax_scale=scale[i], absmax_offset=offset[i]) if code else {}
            start = sum(rows[:i])
            templates.write_nf4(
                packed[i],
                absmax[i],
                (n, columns),
                scales,
                out,
                *((0, start) if transposed else (start, 0)),
                transposed=transposed,
                blocksize=blocksize,
                quant_type=quant_type,
                **nested,
            )
        return out, scales

    return make


def _largest(absmax, code, scale, offset) -> Tensor:
    """No weight is larger: codes are at most 1, and so a weight is at most its block's scale. Double-quantised scales are bounded
    without being decoded, from a 256th of the bytes."""
    if not code:
        return torch.stack([m.amax() for m in absmax]).amax().float()
    return (
        torch.cat(list(code)).abs().amax() * torch.cat(list(scale)).abs().amax()
        + torch.stack([o.reshape(()) for o in offset]).abs().amax()
    )


def backward_flops(grad, x, inputs, packed, *_) -> int:
    return 4 * (grad.numel() // grad.shape[-1]) * sum(p.numel() for p in packed)


@lora_linear_nf4.backward(
    saves=(
        "x",
        "inputs",
        "packed",
        "absmax",
        "code",
        "scale",
        "offset",
        "biases",
        "a",
        "b",
        "scales",
        "dtype",
        "rows",
        "blocksize",
        "quant_type",
        "out1",
    ),
    gives=("x", "inputs", "biases", "a", "b"),
    flops=backward_flops,
)
def lora_linear_nf4_backward(
    grad: Tensor,
    x: Tensor,
    inputs: Sequence[Tensor],
    packed: Sequence[Tensor],
    absmax: Sequence[Tensor],
    code: Sequence[Tensor],
    scale: Sequence[Tensor],
    offset: Sequence[Tensor],
    biases: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    dtype: torch.dtype,
    rows: Sequence[int],
    blocksize: int,
    quant_type: str,
    out1: Tensor,
) -> list[Tensor]:
    """The gradients of `lora_linear_nf4`, whose weights are dequantised once more.

    Args:
        grad: of y, [..., sum of rows] in its dtype.
        out1: xa, as `lora_linear_nf4` returned it. The others are its inputs.

    Returns:
        [dx, dx_i..., dbias_i..., dA_i..., dB_i...], as `lora_linear_backward`: in shape and dtype of what they are gradients of.
    """
    weights = reference_weights(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return lora_linear.backward_op.reference(grad, x, inputs, weights, biases, a, b, scales, dtype, out1)


@lora_linear_nf4.backward_op.provider(
    "grouped",
    because="one scratch for the siblings' weights, one dX product",
    refuses=lambda grad, x, inputs, packed, *_: _refuse(x, packed),
)
def _(
    grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type, out1
):
    """One scratch for the siblings' weights, one dX product."""
    extra = below(a, sum(rows), x.dtype) if extends(x, inputs, sum(rows)) else None
    weight = stacked_weight(x, packed, absmax, code, scale, offset, extra, rows, x.shape[-1], blocksize, quant_type)
    return adapter_gradients(grad, x, inputs, base_gradient(weight, a, dtype), rows, biases, a, b, scales, dtype, out1)


@lora_linear_nf4.backward_op.provider(
    "fp8",
    precision="fp8",
    because=fp8.BECAUSE,
    refuses=lambda grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, *_: (
        refuse_fp8(x, packed, rows)
    ),
)
def _(
    grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type, out1
):
    weight = operand_in_fp8(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return adapter_gradients(
        grad, x, inputs, base_gradient_in_fp8(weight, a, dtype), rows, biases, a, b, scales, dtype, out1
    )


@lora_linear_nf4.backward_op.provider(
    "bitsandbytes",
    because=BITSANDBYTES,
    refuses=lambda grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type, out1: (
        _refuse_bitsandbytes(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    ),
)
def _(
    grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type, out1
):
    weights = _dequantized(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    args = (grad, x, inputs, weights, biases, a, b, scales, dtype, out1)
    return lora_linear.backward_op.choose(args).run(*args)
