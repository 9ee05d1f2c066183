"""NF4 dequantisation: bytes are 0.5 + 1/64 + 2 a weight. ``--sweep`` tries tiles."""

import sys
from pathlib import Path

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
from tunecompile.ops.nf4 import CODES
from tunecompile.templates import nf4
from tunecompile.templates._tiles import Tile
from tunecompile.templates.few_rows import launches

CODE = torch.tensor(CODES["nf4"], device=DEVICE)


def template(shape, **options):
    return lambda p, a, code, scale, offset: nf4.dequantize(
        p, a, shape, torch.bfloat16, absmax_code=code, absmax_scale=scale, absmax_offset=offset, **options
    )


def reference(shape):
    def dequantize(packed, absmax, code, scale, offset):
        scales = code[absmax.int()] * scale.repeat_interleave(256)[: len(absmax)] + offset
        nibbles = torch.cat([packed >> 4, packed & 15], 1).int()
        return (CODE[nibbles].view(-1, 64) * scales[:, None]).bfloat16().view(shape)

    return compiled(dequantize)


def with_state(shape, function):
    """function(packed, bitsandbytes' description of it), which is made before the clock starts."""
    from bitsandbytes.functional import QuantState

    def prepare(packed, absmax, code, scale, offset):
        inner = QuantState(absmax=scale, code=code, blocksize=256, dtype=torch.float32)
        state = QuantState(
            absmax=absmax,
            shape=torch.Size(shape),
            blocksize=64,
            code=CODE,
            quant_type="nf4",
            dtype=torch.bfloat16,
            offset=offset,
            state2=inner,
        )
        return lambda: function(packed, state)

    return Before(prepare)


def bitsandbytes(shape):
    from bitsandbytes.functional import dequantize_4bit

    return with_state(shape, dequantize_4bit)


def unsloth(shape):
    from unsloth.kernels.utils import fast_dequantize

    return with_state(shape, fast_dequantize)


def tiles(shape):
    sizes = (
        (256, 2),
        (256, 4),
        (256, 8),
        (512, 2),
        (512, 4),
        (512, 8),
        (1024, 4),
        (1024, 8),
        (2048, 4),
        (2048, 8),
        (4096, 8),
    )
    return {
        f"{block} words, {warps} warps": template(shape, tile=Tile(block, num_warps=warps)) for block, warps in sizes
    }


def run(bench):
    for n, k in ((14336, 4096), (4096, 4096), (1024, 4096)):
        shape, first = (bench.size(n), bench.size(k)), (n, k) == (14336, 4096)
        n, k = shape
        bench(
            f"{n}x{k} nested",
            {
                INDUCTOR: reference(shape),
                "bitsandbytes": attempt(lambda: bitsandbytes(shape)),
                "Unsloth": attempt(lambda: unsloth(shape)),
                TEMPLATE: template(shape),
                **bench.tiles(lambda: tiles(shape)),
            },
            packed_nf4(n, k),
            bytes=n * k * (0.5 + 1 / 64 + 2),
            check=relative_error,
            shown="NF4 to bf16" if first else "",
        )
    siblings(bench, bench.size(14336), bench.size(4096), rank=16)
    few_rows(bench, -(-bench.size(28672) // 128) * 128, -(-bench.size(4096) // 128) * 128, rows=8)
    n, k = bench.size(14336), bench.size(4096)
    bench(
        f"copy of {n}x{k} bf16 (the limit)",
        {"torch": lambda x: x.clone()},
        lambda s: (randn(n, k, seed=s),),
        bytes=n * k * 4,
    )


def few_rows(bench, n, k, rows):
    """A product of few rows, as a rollout's step has it: packed weights are read where they are."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter multiplies bf16 by their bits
    dequantize = reference((n, k))

    def in_registers(x, *weight):
        parts, _ = launches.begin(x, launches.in_order(x).contiguous(), [nf4.Weight(*weight, n)], [])
        return parts.sum(0).to(x.dtype)

    def written(x, *weight):
        return x @ dequantize(*weight).to(x.dtype).t()

    def theirs():
        from bitsandbytes import matmul_4bit

        return lambda x, *weight: with_state((n, k), lambda packed, state: matmul_4bit(x, packed.t(), state)).prepare(
            *weight
        )()

    bench(
        f"{rows} rows by {n}x{k}",
        {INDUCTOR: compiled(written), "bitsandbytes": attempt(theirs), TEMPLATE: compiled(in_registers)},
        lambda s: (randn(rows, k, seed=s).to(dtype), *packed_nf4(n, k)(s)),
        bytes=n * k * (0.5 + 1 / 64),
        check=relative_error,
    )


def siblings(bench, n, k, rank):
    """Two weights and their adapters' B, for one product that reads them all."""
    width = k + 64

    def one_launch(first, second, *weight):
        out = torch.empty(2 * n, width, dtype=torch.bfloat16, device=DEVICE)
        nf4.dequantize_siblings(
            [nf4.Weight(*weight, n)] * 2, k, out, [nf4.Adapter(first, 2.0, 0), nf4.Adapter(second, 2.0, rank)]
        )
        return out

    def extended(dequantize):
        def call(first, second, *weight):
            beside = torch.block_diag(first * 2, second * 2)
            return torch.cat(
                [
                    torch.cat([dequantize(*weight), dequantize(*weight)]),
                    beside,
                    beside.new_zeros(2 * n, width - k - 2 * rank),
                ],
                1,
            )

        return call

    def by_unsloth():
        function = unsloth((n, k))
        return extended(lambda *weight: function.prepare(*weight)())

    bench(
        f"two of {n}x{k}, extended to {width}",
        {
            INDUCTOR: compiled(extended(reference((n, k)))),
            "Unsloth, then torch": attempt(by_unsloth),
            "template for each, then torch": extended(template((n, k))),
            TEMPLATE: one_launch,
        },
        lambda s: (randn(n, rank, seed=s), randn(n, rank, seed=s + 50), *packed_nf4(n, k)(s)),
        bytes=2 * n * (k * (0.5 + 1 / 64) + 2 * width + 2 * rank),
        check=relative_error,
        shown="two NF4 weights, LoRA's B beside them",
    )


if __name__ == "__main__":
    main({"nf4": run})
