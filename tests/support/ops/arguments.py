"""Arguments of ops at the scale that networks have."""

from __future__ import annotations

import pytest
import torch

from tests.support.ops.checks import tensor
from tunecompile.ops.frozen_weights import DENSE, packed_as

NF4 = packed_as("nf4", 64)


def lora_arguments(x, sizes=(6,), ranks=(2,), bias=False, own=False, dtype=None, adapters=None, base=None, scales=None):
    """Arguments of `lora_linear`, with every tensor at the scale a network has."""
    k, base = x.shape[-1], base or x.dtype
    adapters, dtype = adapters or x.dtype, dtype or x.dtype
    return [
        x,
        [torch.randn(x.shape).to(x.dtype) for _ in sizes] if own else [],
        [tensor((n, k), dtype=base, scale=k**-0.5) for n in sizes],
        [tensor((n,), dtype=base) for n in sizes] if bias else [],
        [tensor((r, k), dtype=adapters, scale=k**-0.5) for r in ranks],
        [tensor((n, r), dtype=adapters) for n, r in zip(sizes, ranks)],
        list(scales or [0.5 + i for i in range(len(sizes))]),
        dtype,
        DENSE,
    ]


def lora_leaves(args):
    x, inputs, _, biases, a, b, *_ = args
    return [x, *inputs, *biases, *a, *b]


def with_lora_leaves(args, new):
    x, inputs, weights, biases, a, b, *rest = args
    it = iter(new)
    return [
        next(it),
        [next(it) for _ in inputs],
        weights,
        [next(it) for _ in biases],
        [next(it) for _ in a],
        [next(it) for _ in b],
        *rest,
    ]


SCALES = [0.5, 2.0, 1.5]


APART = ((128, 64), (128, 64), (16, 128))  #: gate, up and down
JOINT = ((256, 64), (16, 128))  #: one projection whose halves are gate and up, and down


def mlp_adapters(dtype, shapes):
    ranks = (2, 1, 3)[-len(shapes) :]
    a = [(torch.randn(r, k) / k**0.5).to(dtype).requires_grad_() for r, (_, k) in zip(ranks, shapes)]
    b = [torch.randn(n, r).to(dtype).requires_grad_() for r, (n, _) in zip(ranks, shapes)]
    return a, b


def dense_mlp(dtype=torch.float32, activation="silu", adapted=None, shapes=APART):
    a, b = mlp_adapters(adapted or dtype, shapes)
    x = torch.randn(2, 3, 64).to(dtype).requires_grad_()
    weights = [(torch.randn(shape) / shape[1] ** 0.5).to(dtype) for shape in shapes]
    return [x, weights, a, b, SCALES[-len(shapes) :], DENSE, activation]


def packed_mlp(double, activation="silu", shapes=APART):
    pytest.importorskip("bitsandbytes")

    x, weights, *adapters, _, _ = dense_mlp(shapes=shapes)
    made = [quantized(*w.shape, double=double, dtype=torch.float32) for w in weights]
    return [x, tensors_of(made), *adapters, NF4, activation], [expected for _, expected in made]


def mlp_leaves(arguments):
    return [arguments[0], *arguments[2], *arguments[3]]


def quantized(rows, columns, blocksize=64, quant_type="nf4", double=True, dtype=torch.float32, scale=1.0):
    bnb = pytest.importorskip("bitsandbytes")
    weight = (torch.randn(rows, columns) * scale).to(dtype)
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=double, quant_type=quant_type
    )
    nested = (state.state2.code, state.state2.absmax, state.offset) if double else (None, None, None)
    return (packed, state.absmax, *nested, rows, columns, blocksize, quant_type, dtype), bnb.functional.dequantize_4bit(
        packed, state
    )


def tensors_of(made):
    """Those of results of `quantized`, as ops take them in one list."""
    return [each for args, _ in made for each in args[:5] if each is not None]


def dense_and_packed(dtype, double, sizes, ranks, adapters=None, **case):
    """Arguments of `lora_linear` on dequantised weights, and on the packed ones."""
    x = torch.randn(2, 3, 64).to(dtype)
    dense = lora_arguments(x, sizes, ranks, dtype=adapters, adapters=adapters, **case)
    made = [quantized(n, 64, double=double, dtype=dtype) for n in sizes]
    dense[2] = [expected for _, expected in made]
    return dense, [*dense[:2], tensors_of(made), *dense[3:-1], NF4]


def eight_bits_case(sizes=(48, 16), ranks=(4, 8), k=64, rows=40, adapters=torch.float32, **options):
    """bf16 arguments whose rows differ in size by orders of magnitude."""
    x = (torch.randn(2, rows // 2, k) * torch.randn(2, rows // 2, 1).mul(2).exp()).bfloat16()
    return lora_arguments(x, sizes, ranks, dtype=adapters, adapters=adapters, base=torch.bfloat16, **options)


def provider_in(op, name):
    """The provider of a precision in 8 bits."""
    return next(p for p in op.providers if p.precision == name)
