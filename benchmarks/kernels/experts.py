"""Experts: products of sorted rows with LoRA, the gate, the sum of a token's rows, and stacks in 4 and 8 bits.

Bytes are what has to be read and written once. The limit of a product is a dense one of as many rows and one matrix,
which is a row of its own; TFLOP/s leave adapters out.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._harness import (
    DEVICE,
    INDUCTOR,
    TEMPLATE,
    Before,
    attempt,
    compiled,
    main,
    packed_nf4,
    randn,
    relative_error,
)
from tunecompile.ops import clamped_gate, dequantize_4bit, dequantize_fp8_blocks, dequantize_mxfp4
from tunecompile.ops.experts import by_template
from tunecompile.ops.experts.grouped_linear import _backward, _forward
from tunecompile.ops.experts.products import BY_TORCH

RANK = 16
#: tokens, choices of a token, experts, hidden size, width of an expert
WIDTHS = {"Qwen3-30B-A3B, 8192 tokens": (8192, 8, 128, 2048, 768), "gpt-oss-20b, 4096": (4096, 4, 32, 2880, 2880)}
TORCH, DENSE = "torch, products apart", "one dense matrix"


def routed(tokens: int, choices: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, its inverse, offsets) of random choices."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    ids = torch.randint(experts, (tokens * choices,), generator=g, device=DEVICE)
    order = ids.argsort()
    return order, order.argsort(), torch.bincount(ids, minlength=experts).cumsum(0)


def operands(tokens, choices, experts, width, columns, seed):
    """(x, order, weight, offsets, a, b): rows of x are read by the order."""
    order, _, offsets = routed(tokens, choices, experts, seed)
    weight = randn(experts, columns, width, seed=seed) * 0.02
    a, b = randn(experts * RANK, width, seed=seed + 1) * 0.02, randn(columns, RANK * experts, seed=seed + 2) * 0.02
    return randn(tokens, width, seed=seed + 3), order, weight, offsets, a, b


def limit(choices: int) -> Any:
    """A dense product of as many rows, which are there before the clock starts."""

    def prepare(x, order, weight, *_):
        rows = x.repeat(choices, 1)

        def call() -> None:
            rows @ weight[0].t()

        return call

    return Before(prepare)


def unsloth(choices: int) -> Any:
    """Unsloth's grouped product, of the base alone."""
    from unsloth.kernels.moe.grouped_gemm.interface import grouped_gemm

    def call(x, order, weight, offsets, *_):
        sizes = torch.diff(offsets, prepend=offsets.new_zeros(1)).int()
        return grouped_gemm(
            x,
            weight,
            sizes,
            topk=choices,
            gather_indices=order.int(),
            permute_x=True,
            autotune=True,
            is_first_gemm=True,
        )

    return call


def error(value: Any, reference: Any) -> float:
    """Nothing of a system without a result."""
    return float("nan") if value is None else relative_error(value, reference)


def products(bench, name: str, sizes: tuple[int, ...], first: bool) -> None:
    """Forward and backward of the gate and up projection, rows read where tokens stand."""
    tokens, choices, experts, width, inner = sizes
    columns, scales = 2 * inner, [1.0]

    def torchs(x, order, weight, offsets, a, b):
        return _forward(BY_TORCH, x[order // choices], weight, offsets, [a], [b], scales, False, None)

    def base(x, order, weight, offsets, a, b) -> None:
        torch._grouped_mm(x[order // choices], weight.transpose(1, 2), offs=offsets.int())

    def template(x, order, weight, offsets, a, b):
        return by_template.forward(x, weight, offsets, [a], [b], scales, False, None, order=order, choices=choices)

    def torchs_back(grad, xa, x, order, weight, offsets, a, b):
        used = [True, False, True, True, False]
        made = _backward(BY_TORCH, grad, x[order // choices], weight, offsets, [a], [b], scales, False, None, xa, used)
        return [each for each in made if each is not None and each.numel()]

    def template_back(grad, xa, x, order, weight, offsets, a, b):
        used = [True, False, True, True, False]
        given = (grad, x, weight, offsets, [a], [b], scales, False, None, xa)
        made = by_template.backward(*given, used=used, order=order, choices=choices)
        return [each for each in made if each is not None]

    def with_gradient(seed):
        given = operands(tokens, choices, experts, width, columns, seed)
        return randn(tokens * choices, columns, seed=seed + 9), template(*given)[1], *given

    rows, stack = tokens * choices, experts * columns * width
    flops = 2 * rows * width * columns
    bench(
        f"{name}: gate and up with LoRA, forward",
        {
            TORCH: compiled(torchs),
            "torch, base alone": base,
            "Unsloth, base alone": attempt(lambda: unsloth(choices)),
            TEMPLATE: template,
            DENSE: limit(choices),
        },
        lambda seed: operands(tokens, choices, experts, width, columns, seed),
        bytes=2 * (tokens * width + stack + rows * columns),
        flops=flops,
        check=error,
        shown="experts with LoRA" if first else "",
    )
    bench(
        f"{name}: gate and up with LoRA, backward",
        {TORCH: compiled(torchs_back), TEMPLATE: template_back},
        with_gradient,
        bytes=2 * (tokens * width + stack + rows * (columns + width)),
        flops=flops,
        check=error,
        shown="experts with LoRA, backward" if first else "",
    )


def gates(bench, tokens: int, choices: int, width: int) -> None:
    """gpt-oss's gate. (SwiGLU is in benchmarks/kernels/swiglu.py.)"""
    from tunecompile.templates import swiglu

    rows = tokens * choices
    bench(
        f"clamped gate, {rows} rows of {width}",
        {
            INDUCTOR: compiled(lambda both: clamped_gate.reference(both, 1.702, 7.0)),
            TEMPLATE: lambda both: swiglu.clamped(both, 1.702, 7.0),
        },
        lambda seed: (randn(rows, 2 * width, seed=seed),),
        bytes=2 * 3 * rows * width,
        check=error,
        shown="clamped gate of experts",
    )
    bench(
        f"clamped gate, {rows} rows of {width}, backward",
        {
            INDUCTOR: compiled(lambda grad, both: clamped_gate.backward_op.reference(grad, both, 1.702, 7.0)[0]),
            TEMPLATE: lambda grad, both: swiglu.clamped_backward(grad, both, 1.702, 7.0),
        },
        lambda seed: (randn(rows, width, seed=seed), randn(rows, 2 * width, seed=seed + 1)),
        bytes=2 * 5 * rows * width,
        check=error,
    )


def sums(bench, name: str, tokens: int, choices: int, experts: int, width: int, first: bool) -> None:
    """Rows back to their tokens."""
    from tunecompile.templates import experts as kernels

    def added(y, order, places):
        return torch.zeros(tokens, width, dtype=y.dtype, device=y.device).index_add_(0, order // choices, y)

    def given(seed):
        order, places, _ = routed(tokens, choices, experts, seed)
        return randn(tokens * choices, width, seed=seed), order, places

    bench(
        f"{name}: sum of a token's rows",
        {
            INDUCTOR: compiled(
                lambda y, order, places: y[places].view(tokens, choices, width).float().sum(1).to(y.dtype)
            ),
            "torch, index_add": added,
            TEMPLATE: lambda y, order, places: kernels.collect(y, places, choices, y.dtype),
        },
        given,
        bytes=2 * tokens * width * (choices + 1),
        check=error,
        shown="sum of a token's rows" if first else "",
    )


def dequantisers(bench, experts: int, rows: int, columns: int) -> None:
    """A stack in each format: bytes are the codes, the scales, and the values in bf16."""
    from tunecompile.templates import mxfp4, nf4

    count, shape = experts * rows * columns, (experts * rows, columns)

    def codes(seed, *shape, low=0, high=256):
        g = torch.Generator(DEVICE).manual_seed(seed)
        return torch.randint(low, high, shape, generator=g, device=DEVICE, dtype=torch.uint8)

    def transformers():
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return lambda packed, scales: convert_moe_packed_tensors(
            packed.view(experts, rows, -1, 16), scales.view(experts, rows, -1)
        ).transpose(1, 2)

    bench(
        f"MXFP4, {experts} experts of {rows}x{columns}",
        {
            INDUCTOR: compiled(lambda p, s: dequantize_mxfp4.reference(p, s, *shape, torch.bfloat16)),
            "transformers": attempt(transformers),
            TEMPLATE: lambda p, s: mxfp4.dequantize(p, s, shape, torch.bfloat16),
        },
        lambda seed: (codes(seed, count // 2, 1), codes(seed + 1, count // 32, low=118, high=126)),
        bytes=count * (0.5 + 1 / 32 + 2),
        check=lambda value, reference: error(value.reshape(-1), reference.reshape(-1)),
        shown="MXFP4 experts",
    )
    options = (64, "nf4", torch.bfloat16)
    bench(
        f"NF4, {experts} experts of {rows}x{columns}",
        {
            INDUCTOR: compiled(lambda *given: dequantize_4bit.reference(*given, *shape, *options)),
            "bitsandbytes": attempt(lambda: _bitsandbytes(shape, options)),
            TEMPLATE: lambda p, a, code, scale, offset: nf4.dequantize(
                p, a, shape, torch.bfloat16, absmax_code=code, absmax_scale=scale, absmax_offset=offset
            ),
        },
        packed_nf4(*shape),
        bytes=count * (0.5 + 1 / 64 + 2),
        check=error,
    )
    blocks = -(-rows // 128), -(-columns // 128)
    bench(
        f"FP8 in blocks, {experts} experts of {rows}x{columns}",
        {INDUCTOR: compiled(lambda c, s: dequantize_fp8_blocks.reference(c, s, 128, 128, torch.bfloat16))},
        lambda seed: (codes(seed, experts, rows, columns, high=120), randn(experts, *blocks, dtype=torch.float32)),
        bytes=count * 3,
        check=error,
    )


def _bitsandbytes(shape: tuple[int, int], options: tuple) -> Any:
    import bitsandbytes  # noqa: F401 (registers its ops)

    (provider,) = (each for each in dequantize_4bit.providers if each.name == "bitsandbytes")
    return lambda *given: provider.run(*given, *shape, *options)


def run(bench) -> None:
    """All cases."""
    for name, (tokens, choices, experts, width, inner) in WIDTHS.items():
        first = name.startswith("Qwen")
        if bench.dry:
            tokens, choices, experts, width, inner = 16, 2, 4, 32, 16
        products(bench, name, (tokens, choices, experts, width, inner), first)
        sums(bench, name, tokens, choices, experts, width, first)
    gates(bench, bench.size(4096), 4, bench.size(2880))
    dequantisers(bench, *(map(bench.size, (32, 5760, 2880)) if not bench.dry else (2, 32, 64)))


if __name__ == "__main__":
    main({"experts": run})
