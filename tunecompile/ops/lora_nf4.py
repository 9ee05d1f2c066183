"""LoRA over 4-bit weights as one op: the dequantised weights live in one scratch buffer, and only while a product reads them."""

from typing import Sequence

import torch
from torch import Tensor

from tunecompile.op import Cost, has_triton, op
from tunecompile.ops import fp8
from tunecompile.ops.lora import (HALF, adapter_gradients, base_gradient, base_gradient_in_fp8, down, extends, finish, forward_in_fp8,
                                  lora_linear)
from tunecompile.ops.nf4 import dequantize_4bit


def _arguments(packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype) -> list[tuple]:
    """What `dequantize_4bit` takes, for each weight."""
    nested = bool(code)
    return [(packed[i], absmax[i], code[i] if nested else None, scale[i] if nested else None, offset[i] if nested else None,
             n, columns, blocksize, quant_type, dtype) for i, n in enumerate(rows)]


def _weights(*args) -> list[Tensor]:
    return [dequantize_4bit.reference(*each) for each in _arguments(*args)]


def _bitsandbytes(packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype) -> bool:
    """Whether its kernel dequantises all weights. (Generated code looks each level up in a table, several times slower on a CPU.)"""
    args = _arguments(packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype)
    return all(dequantize_4bit.choose(each).name == "bitsandbytes" for each in args)


def _dequantized(*args) -> list[Tensor]:
    return [dequantize_4bit.choose(each).run(*each) for each in _arguments(*args)]


def _supports(x: Tensor, packed: Sequence[Tensor]) -> bool:
    return x.is_cuda and x.dtype in HALF and has_triton() and all(p.is_contiguous() for p in packed)


def forward_flops(x, inputs, packed, *_) -> int:
    return 4 * (x.numel() // x.shape[-1]) * sum(p.numel() for p in packed)


@op(cost=Cost.MATMUL, flops=forward_flops)
def lora_linear_nf4(x: Tensor, inputs: Sequence[Tensor], packed: Sequence[Tensor], absmax: Sequence[Tensor], code: Sequence[Tensor],
                    scale: Sequence[Tensor], offset: Sequence[Tensor], biases: Sequence[Tensor], a: Sequence[Tensor],
                    b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype, rows: Sequence[int], blocksize: int,
                    quant_type: str) -> tuple[Tensor, Tensor]:
    """`lora_linear` over weights `dequantize_4bit` makes: W_i is [rows[i], K] in x's dtype.

    packed, absmax: one each a weight; code, scale, offset: the three tensors of double quantisation, or empty.
    """
    weights = _weights(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return lora_linear.reference(x, inputs, weights, biases, a, b, scales, dtype)


@lora_linear_nf4.provider("k_extension", supports=lambda x, inputs, packed, *_: _supports(x, packed))
def _(x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type):
    """[x | xa] @ [W | scale B]^T: the dequantisation kernel writes W and scale B side by side, each sibling into its rows."""
    from tunecompile.templates import nf4

    tokens, ranks = x.reshape(-1, x.shape[-1]), [m.shape[0] for m in a]
    xa = down(x, inputs, a, dtype)
    extended = torch.empty((sum(rows), x.shape[-1] + sum(ranks)), dtype=x.dtype, device=x.device)
    for i, n in enumerate(rows):
        nested = dict(absmax_code=code[i], absmax_scale=scale[i], absmax_offset=offset[i]) if code else {}
        nf4.dequantize_extended(packed[i], absmax[i], (n, x.shape[-1]), x.dtype, b[i], scale=scales[i], rank_offset=sum(ranks[:i]),
                                ranks=sum(ranks), blocksize=blocksize, quant_type=quant_type, out=extended,
                                out_row_offset=sum(rows[:i]), **nested)
    return finish(torch.cat([tokens, xa.to(x.dtype)], 1) @ extended.t(), x, biases), xa


@lora_linear_nf4.provider("bitsandbytes", supports=lambda x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows,
                          blocksize, quant_type: _bitsandbytes(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype))
def _(x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type):
    weights = _dequantized(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return lora_linear.choose((x, inputs, weights, biases, a, b, scales, dtype)).run(x, inputs, weights, biases, a, b, scales, dtype)


def _refuse_fp8(x: Tensor, packed: Sequence[Tensor], rows: Sequence[int]) -> str | None:
    if not all(p.is_contiguous() and p.storage_offset() % 4 == 0 for p in packed):
        return "the packed weight is not contiguous, or begins at an odd byte"
    return fp8.refuse(x, rows)


@lora_linear_nf4.provider("fp8", precision="fp8", refuses=lambda x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows,
                          *_: _refuse_fp8(x, packed, rows))
def _(x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type):
    weight = _operand_in_fp8(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return forward_in_fp8(x, inputs, weight, biases, a, b, scales, dtype)


def _operand_in_fp8(packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype) -> fp8.Operand:
    """Codes to e4m3 with nothing in between; each sibling into its rows, or columns where the weight is transposed."""
    if not packed[0].is_cuda:
        return fp8.dense_operand(_weights(packed, absmax, code, scale, offset, rows, columns, blocksize, quant_type, dtype))
    from tunecompile.templates import fp8 as templates

    def make(adapter, transposed):
        shape = (columns, sum(rows)) if transposed else (sum(rows), columns)
        out, scales = templates.begin_weight(_largest(absmax, code, scale, offset), adapter, *shape, fp8.width_of(shape[1], adapter))
        for i, n in enumerate(rows):
            nested = dict(absmax_code=code[i], absmax_scale=scale[i], absmax_offset=offset[i]) if code else {}
            start = sum(rows[:i])
            templates.write_nf4(packed[i], absmax[i], (n, columns), scales, out, *((0, start) if transposed else (start, 0)),
                                transposed=transposed, blocksize=blocksize, quant_type=quant_type, **nested)
        return out, scales

    return make


def _largest(absmax, code, scale, offset) -> Tensor:
    """No weight is larger: codes are at most 1, and so a weight is at most its block's scale. Double-quantised scales are bounded
    without being decoded, from a 256th of the bytes."""
    if not code:
        return torch.stack([m.amax() for m in absmax]).amax().float()
    return torch.cat(list(code)).abs().amax() * torch.cat(list(scale)).abs().amax() + torch.stack([o.reshape(()) for o in offset]).abs().amax()


def backward_flops(grad, x, inputs, packed, *_) -> int:
    return 4 * (grad.numel() // grad.shape[-1]) * sum(p.numel() for p in packed)


@lora_linear_nf4.backward(
    saves=("x", "inputs", "packed", "absmax", "code", "scale", "offset", "biases", "a", "b", "scales", "dtype", "rows", "blocksize",
           "quant_type", "out1"), gives=("x", "inputs", "biases", "a", "b"), flops=backward_flops)
def lora_linear_nf4_backward(grad: Tensor, x: Tensor, inputs: Sequence[Tensor], packed: Sequence[Tensor], absmax: Sequence[Tensor],
                             code: Sequence[Tensor], scale: Sequence[Tensor], offset: Sequence[Tensor], biases: Sequence[Tensor],
                             a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype,
                             rows: Sequence[int], blocksize: int, quant_type: str, out1: Tensor) -> list[Tensor]:
    """[dx, dx_i..., dbias_i..., dA_i..., dB_i...], as `lora_linear_backward`."""
    weights = _weights(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return lora_linear.backward_op.reference(grad, x, inputs, weights, biases, a, b, scales, dtype, out1)


@lora_linear_nf4.backward_op.provider("grouped", supports=lambda grad, x, inputs, packed, *_: _supports(x, packed))
def _(grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type, out1):
    """One scratch for the siblings' weights, one dX product."""
    from tunecompile.templates import nf4

    below = [m.shape[0] for m in a] if extends(x, inputs, sum(rows)) else []
    weight = torch.empty((sum(rows) + sum(below), x.shape[-1]), dtype=x.dtype, device=x.device)
    for i, n in enumerate(rows):
        nested = dict(absmax_code=code[i], absmax_scale=scale[i], absmax_offset=offset[i]) if code else {}
        nf4.dequantize(packed[i], absmax[i], (n, x.shape[-1]), x.dtype, blocksize=blocksize, quant_type=quant_type, out=weight,
                       out_row_offset=sum(rows[:i]), **nested)
    for i, m in enumerate(a[:len(below)]):
        nf4.append_rows(m, weight, sum(rows) + sum(below[:i]))
    return adapter_gradients(grad, x, inputs, base_gradient(weight, a, dtype), rows, biases, a, b, scales, dtype, out1)


@lora_linear_nf4.backward_op.provider("fp8", precision="fp8", refuses=lambda grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales,
                                      dtype, rows, *_: _refuse_fp8(x, packed, rows))
def _(grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type, out1):
    weight = _operand_in_fp8(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return adapter_gradients(grad, x, inputs, base_gradient_in_fp8(weight, a, dtype), rows, biases, a, b, scales, dtype, out1)


@lora_linear_nf4.backward_op.provider("bitsandbytes", supports=lambda grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype,
                                      rows, blocksize, quant_type, out1: _bitsandbytes(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize,
                                                                                       quant_type, x.dtype))
def _(grad, x, inputs, packed, absmax, code, scale, offset, biases, a, b, scales, dtype, rows, blocksize, quant_type, out1):
    weights = _dequantized(packed, absmax, code, scale, offset, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    args = (grad, x, inputs, weights, biases, a, b, scales, dtype, out1)
    return lora_linear.backward_op.choose(args).run(*args)
