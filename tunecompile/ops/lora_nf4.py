"""LoRA over 4-bit weights as one op: dequantised weights live in one scratch buffer while a product reads them.

(QLoRA: Dettmers et al., 2023, arXiv:2305.14314.)
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.eight_bits import FORMATS, EightBits
from tunecompile.ops.frozen_weights import FrozenWeights, PackedWeights
from tunecompile.ops.lora import (
    adapter_gradients,
    backward_shapes,
    base_gradient,
    base_gradient_in,
    extends,
    finish,
    forward_in,
    lora_linear,
    lora_linear_backward,
    shapes,
    with_xa,
)
from tunecompile.ops.nf4 import BITSANDBYTES
from tunecompile.ops.packed import few_rows

__all__ = ["lora_linear_nf4", "lora_linear_nf4_backward"]


def _packed(x: Tensor, packed, absmax, code, scale, offset, rows, blocksize, quant_type) -> PackedWeights:
    return PackedWeights(packed, absmax, code, scale, offset, rows, blocksize, quant_type, x.shape[-1], x.dtype)


def _refuse_bitsandbytes(x, packed, absmax, code, scale, offset, rows, blocksize, quant_type) -> str | None:
    return _packed(x, packed, absmax, code, scale, offset, rows, blocksize, quant_type).refuse_bitsandbytes()


def _refuse(x: Tensor, packed: Sequence[Tensor]) -> Note | None:
    contiguous = all(p.is_contiguous() for p in packed)
    return refuse_gpu(x) or (None if contiguous else note("not-contiguous", "the packed weight is"))


def forward_flops(x, inputs, packed, *_) -> int:
    """Count the base products of all siblings; adapters are left out."""
    return 4 * (x.numel() // x.shape[-1]) * sum(p.numel() for p in packed)


def _shapes(x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, *_) -> tuple[Tensor, Tensor]:
    return shapes(x, a, b, dtype)


def _backward_shapes(grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, *_) -> list[Tensor]:
    return backward_shapes(x, inputs, biases, a, b)


def _example(draw) -> list:
    x, inputs, weights, _, *adapters = lora_linear.example(draw)
    heights, block = [w.shape[0] for w in weights], 64
    packed = [draw.codes(n * 192 // 2, 1) for n in heights]
    scales = [draw.normal(n * 192 // block, dtype=torch.float32).abs() * 192**-0.5 for n in heights]
    return [x, inputs, packed, scales, [], [], [], [], *adapters, heights, block, "nf4"]


@op(cost=Cost.MATMUL, flops=forward_flops, shapes=_shapes, example=_example)
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
    """Return `lora_linear` of 4-bit weights: W_i is [rows[i], K], dequantised to x's dtype (QLoRA, arXiv:2305.14314).

    Args:
        x: [..., K]. This and inputs, biases, a, b, scales and dtype: as for `tunecompile.ops.lora.lora_linear`.
        packed: one a weight, uint8 with rows[i] * K / 2 elements. This and the following arguments: as for
            `tunecompile.ops.nf4.dequantize_4bit`.
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
    weights = _packed(x, packed, absmax, code, scale, offset, rows, blocksize, quant_type).reference()
    return lora_linear.reference(x, inputs, weights, biases, a, b, scales, dtype)


def _refuse_few(x, inputs, packed, a, b, dtype, rows, blocksize) -> Note | None:
    if inputs or dtype != x.dtype:
        return note("arguments-not-supported")
    return few_rows.refuse(x, x.shape[-1], packed, rows, blocksize, a, b)


@lora_linear_nf4.provider("few_rows", because=few_rows.BECAUSE, refuses=_refuse_few)
def _(*, x, inputs, biases, a, b, scales, dtype, **packed):
    """Two launches for all siblings, adapters included."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y, xa = few_rows.product(rows, _packed(x, **packed), a, b, scales)
    return finish(y, x, biases), xa


@lora_linear_nf4.provider(
    "k_extension",
    because="weights and adapters are dequantised to where one product for all siblings reads them",
    refuses=_refuse,
)
def _(*, x, inputs, biases, a, b, scales, dtype, **packed):
    """[x | xa] @ [W | scale B]^T: the dequantisation kernel writes W and scale B side by side."""
    wide, xa = with_xa(x, inputs, a, dtype)
    return finish(wide @ _packed(x, **packed).extended(b, scales).t(), x, biases), xa


@lora_linear_nf4.provider("bitsandbytes", because=BITSANDBYTES, refuses=_refuse_bitsandbytes)
def _(*, x, inputs, biases, a, b, scales, dtype, **packed):
    args = (x, inputs, _packed(x, **packed).dequantized(), biases, a, b, scales, dtype)
    return lora_linear.choose(args).run(*args)


def refuse_in(eight: EightBits, x: Tensor, packed: Sequence[Tensor], rows: Sequence[int]) -> Note | None:
    """Return why products in 8 bits cannot read these packed weights, or None: `EightBits.refuse` says more."""
    if not all(p.is_contiguous() and p.storage_offset() % 4 == 0 for p in packed):
        return note("eight-bits-packed-weight")
    return eight.refuse(x, rows)


def _forward_in(eight: EightBits) -> None:
    @lora_linear_nf4.provider(
        eight.name, precision=eight.name, because=eight.because, refuses=partial(refuse_in, eight)
    )
    def _(*, x, inputs, biases, a, b, scales, dtype, **packed):
        frozen = FrozenWeights.of_packed(_packed(x, **packed))
        return forward_in(eight, x, inputs, frozen, biases, a, b, scales, dtype)


def backward_flops(grad, x, inputs, packed, *_) -> int:
    """Count dX: as much as the forward."""
    return 4 * (grad.numel() // grad.shape[-1]) * sum(p.numel() for p in packed)


@lora_linear_nf4.backward(gives=("x", "inputs", "biases", "a", "b"), flops=backward_flops, shapes=_backward_shapes)
def lora_linear_nf4_backward(
    grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type, out1
) -> list[Tensor]:
    """Return the gradients of `lora_linear_nf4`; the weights are dequantised a second time.

    Args:
        grad: of y, [..., sum of rows] in its dtype.
        out1: xa, as `lora_linear_nf4` returned it. The others are its inputs.

    Returns:
        [dx, dx_i..., dbias_i..., dA_i..., dB_i...], each with the shape and dtype of its input, as
        `lora_linear_backward`."""
    weights = _packed(x, packed, absmax, code, scale, offset, rows, blocksize, quant_type).reference()
    return lora_linear_backward.reference(grad, x, inputs, weights, biases, a, b, scales, dtype, out1)


@lora_linear_nf4_backward.provider(
    "grouped", because="one scratch for the siblings' weights, one dX product", refuses=_refuse
)
def _(*, grad, x, inputs, biases, a, b, scales, dtype, out1, rows, **packed):
    """One scratch buffer for the siblings' weights, one dX product."""
    frozen = FrozenWeights.of_packed(_packed(x, rows=rows, **packed))
    weight = frozen.stacked(a, x.dtype, with_adapters=extends(x, inputs, frozen.height))
    base = base_gradient(weight, a, dtype)
    return adapter_gradients(grad, x, inputs, base, rows, biases, a, b, scales, dtype, out1)


def _backward_in(eight: EightBits) -> None:
    @lora_linear_nf4_backward.provider(
        eight.name, precision=eight.name, because=eight.because, refuses=partial(refuse_in, eight)
    )
    def _(*, grad, x, inputs, biases, a, b, scales, dtype, out1, rows, **packed):
        base = base_gradient_in(eight, FrozenWeights.of_packed(_packed(x, rows=rows, **packed)), a, dtype)
        return adapter_gradients(grad, x, inputs, base, rows, biases, a, b, scales, dtype, out1)


for each in FORMATS:
    _forward_in(each)
    _backward_in(each)


@lora_linear_nf4_backward.provider("bitsandbytes", because=BITSANDBYTES, refuses=_refuse_bitsandbytes)
def _(*, grad, x, inputs, biases, a, b, scales, dtype, out1, **packed):
    args = (grad, x, inputs, _packed(x, **packed).dequantized(), biases, a, b, scales, dtype, out1)
    return lora_linear_backward.choose(args).run(*args)
