"""NF4 dequantisation: bytes are 0.5 + 1/64 + 2 a weight. ``--sweep`` tries tiles, and the two kinds of lookup."""

import torch
from _harness import Bench, attempt, compiled, packed_nf4, randn, relative_error

from tunecompile.templates import nf4
from tunecompile.templates._tiles import Tile

bench = Bench("nf4")
CODE = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], device="cuda")


def template(shape, **options):
    return lambda p, a, code, scale, offset: nf4.dequantize(
        p, a, shape, torch.bfloat16, absmax_code=code, absmax_scale=scale, absmax_offset=offset, **options)


def reference(shape):
    def dequantize(packed, absmax, code, scale, offset):
        scales = code[absmax.int()] * scale.repeat_interleave(256) + offset
        nibbles = torch.cat([packed >> 4, packed & 15], 1).int()
        return (CODE[nibbles].view(-1, 64) * scales[:, None]).bfloat16().view(shape)
    return compiled(dequantize)


def bitsandbytes(shape):
    from bitsandbytes import functional as F

    def dequantize(packed, absmax, code, scale, offset):
        inner = F.QuantState(absmax=scale, code=code, blocksize=256, dtype=torch.float32)
        return F.dequantize_4bit(packed, F.QuantState(
            absmax=absmax, shape=shape, blocksize=64, code=CODE, quant_type="nf4", dtype=torch.bfloat16, offset=offset, state2=inner))
    return dequantize


for n, k in ((14336, 4096), (4096, 4096), (1024, 4096)):
    shape = (n, k)
    systems = {"reference, torch.compile": reference(shape), "bitsandbytes": attempt(lambda: bitsandbytes(shape)),
               "template": template(shape)}
    if bench.options.sweep:
        for block, warps in ((256, 2), (256, 4), (256, 8), (512, 2), (512, 4), (512, 8), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8)):
            systems[f"{block} words, {warps} warps"] = template(shape, tile=Tile(block, num_warps=warps))
    bench(f"{n}x{k} nested", systems, packed_nf4(n, k), bytes=n * k * (0.5 + 1 / 64 + 2), check=relative_error)

n, k, rank, width = 14336, 4096, 16, 4160


def siblings(first, second, *weight):
    out = torch.empty(2 * n, width, dtype=torch.bfloat16, device="cuda")
    nf4.dequantize_siblings([nf4.Weight(*weight, n)] * 2, k, out, [nf4.Adapter(first, 2.0, 0), nf4.Adapter(second, 2.0, rank)])
    return out


def apart(first, second, *weight):
    beside = torch.block_diag(first * 2, second * 2)
    return torch.cat([template((n, k))(*weight).repeat(2, 1), beside, beside.new_zeros(2 * n, width - k - 2 * rank)], 1)


bench(f"two of {n}x{k}, extended to {width}", {"dequantise, scale B, cat (torch)": apart, "template": siblings},
      lambda s: (randn(n, rank, seed=s), randn(n, rank, seed=s + 50), *packed_nf4(n, k)(s)),
      bytes=2 * n * (k * (0.5 + 1 / 64) + 2 * width + 2 * rank), check=relative_error)
bench("copy of 14336x4096 bf16 (the limit)", {"torch": lambda x: x.clone()}, lambda s: (randn(14336, 4096, seed=s),), bytes=14336 * 4096 * 4)
bench.show()
