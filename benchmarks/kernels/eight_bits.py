"""Products in 8 bits of the 8B shapes at 8,192 tokens: what scales, accumulation and the adapter's columns cost, and what makes the operands.

Decides, for tunecompile/ops/eight_bits.py: scales by tensor or by row, fast accumulation or not, the width rows are padded to, who
quantises; for templates/int8_product.py: tiles. Products beside bf16's; the error is that of the product of the same FP8 values (accumulation and output rounding only).
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._harness import DEVICE, INDUCTOR, TEMPLATE, compiled, main, packed_nf4, randn, relative_error
from tunecompile.ops.nf4 import CODES
from tunecompile.templates import eight_bits, int8_product
from tunecompile.templates._tiles import Tile

T, RANK, E4M3 = 8192, 16, torch.float8_e4m3fn
WEIGHT_SCALE = 1e-2
INT8_TILES = [  # columns, rows, warps, stages, step
    Tile(columns, rows, warps, stages, step)
    for columns, rows, warps, stages, step in (
        (256, 128, 8, 3, 128),
        (256, 128, 8, 4, 64),
        (128, 256, 8, 4, 128),
        (128, 128, 8, 4, 128),
        (128, 128, 4, 4, 128),
        (128, 128, 8, 3, 128),
        (256, 64, 4, 4, 128),
    )
]
SHAPES = {  # product -> (columns out, what is summed, ranks of its siblings)
    "qkv": (6144, 4096, 48),
    "o": (4096, 4096, 16),
    "gate|up": (28672, 4096, 32),
    "down": (4096, 14336, 16),
    "dX of qkv": (4096, 6144, 48),
    "dX of gate|up": (4096, 28672, 32),
    "dX of down": (14336, 4096, 16),
}


def pad(width, to):
    return -(-width // to) * to


def operands(n, k, ranks):
    """x, w in bf16, the adapter's factors in fp32, and both operands in e4m3 with their scales by width: k, without the adapter, and wider."""

    def make(seed):
        x, w = randn(T, k, seed=seed), randn(n, k, seed=seed + 100) * 0.02
        xa, b = randn(T, ranks, seed=seed, dtype=torch.float32), randn(n, ranks, seed=seed, dtype=torch.float32) * 1e-3
        made = {
            width: (
                *eight_bits.quantize_rows(x, xa if width > k else None, width),
                *weight(w, b if width > k else None, width),
            )
            for width in {k, *(pad(k + 3 * ranks, to) for to in (16, 128))}
        }
        made["int8"] = (*eight_bits.quantize_rows(x, None, k, torch.int8), *int8_weight(w, k))
        return x, w, xa, b, made

    return make


def weight(w, b, width):
    out, scale = eight_bits.begin_weight(w.abs().amax().float(), b, w.shape[0], w.shape[1], width)
    eight_bits.write_dense(w, scale, out)
    return out, scale


def int8_weight(w, width):
    scale = w.abs().amax(1).float() / 127
    out = torch.zeros(w.shape[0], width, dtype=torch.int8, device=DEVICE)
    eight_bits.write_dense(w, scale, out)
    return out, scale


def in_int8(tile=None):
    def product(x, w, xa, b, made):
        return int8_product.product(*made["int8"], xa, b, torch.bfloat16, tile=tile)

    return product


def by_row(width, fast):
    def product(x, w, xa, b, made):
        a, sa, c, sc = made[width]
        return torch._scaled_mm(a, c.t(), sa, sc, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return product


def by_tensor(width, fast):
    def product(x, w, xa, b, made):
        a, _, c, _ = made[width]
        one = torch.ones((), device=DEVICE)  # its value costs nothing
        return torch._scaled_mm(a, c.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return product


def then_addmm(width):
    def product(x, w, xa, b, made):
        return by_row(width, True)(x, w, xa, b, made).addmm_(xa.bfloat16(), b.bfloat16().t())

    return product


def cast(dtype, by_row):
    """Rounded to that format and back, each row or the whole scaled to its range."""

    def product(g, w):
        largest = (g.abs().amax(1, keepdim=True) if by_row else g.abs().amax()).float() / torch.finfo(dtype).max
        return ((g / largest).to(dtype).float() * largest) @ w.float()

    return product


def gradient(seed):
    """Rows of sizes as far apart as tokens' gradients are, a few channels large."""
    spread = (
        randn(T, 1, seed=seed, dtype=torch.float32).mul(2).exp()
        * randn(1, 4096, seed=seed + 1, dtype=torch.float32).mul(1.5).exp()
    )
    return randn(T, 4096, seed=seed + 2, dtype=torch.float32) * spread, randn(4096, 1024, seed=seed + 3) * 0.02


def in_torch(x, extra, width):
    """What quantize_rows does, for Inductor to fuse."""
    largest = torch.maximum(x.abs().amax(1, keepdim=True).float(), extra.abs().amax(1, keepdim=True)).clamp_min(1e-30)
    scale = largest / 448
    e = extra / scale
    high = e.to(E4M3)
    low = (e - high.float()).to(E4M3)
    zeros = x.new_zeros((x.shape[0], width - x.shape[1] - 3 * extra.shape[1]), dtype=E4M3)
    return torch.cat([(x / scale).to(E4M3), high, low, high, zeros], 1), scale


def nf4_to_fp8(n, k, transposed, **options):
    rows, columns = (k, n) if transposed else (n, k)
    out = torch.empty(rows, columns + 128, dtype=E4M3, device=DEVICE)
    scale = torch.full((1, rows), WEIGHT_SCALE, device=DEVICE)

    def write(packed, absmax, code, outer, offset):
        eight_bits.write_nf4(
            packed,
            absmax,
            (n, k),
            scale,
            out,
            transposed=transposed,
            absmax_code=code,
            absmax_scale=outer,
            absmax_offset=offset,
            **options,
        )
        return out[:, :columns]

    return write


def products(bench):
    for case, (n, k, ranks) in SHAPES.items():
        widths = {to: pad(k + 3 * ranks, to) for to in (16, 128)}
        systems = {
            "bf16": lambda x, w, *_: x @ w.t(),
            "by tensor, fast": by_tensor(k, True),
            "by tensor, slow": by_tensor(k, False),
            "by row, fast": by_row(k, True),
            "by row, slow": by_row(k, False),
            "by row, fast, then addmm": then_addmm(k),
        }
        systems |= {f"by row, fast, adapter in K to {to}: +{w - k}": by_row(w, True) for to, w in widths.items()}
        systems[f"by row, slow, adapter in K to 128: +{widths[128] - k}"] = by_row(widths[128], False)
        systems |= {"INT8": in_int8()} | bench.tiles(lambda: {f"INT8, {tile}": in_int8(tile) for tile in INT8_TILES})
        systems["INT8, cuBLAS's sums alone"] = lambda x, w, xa, b, made: torch._int_mm(
            made["int8"][0], made["int8"][2].t()
        )
        bench(f"{case}: {n}x{k}", systems, operands(n, k, ranks), bytes=T * k + n * k + 2 * T * n, flops=2 * T * n * k)


def errors(bench):
    for k in (4096, 14336, 28672):  # against fp64 products of the same values: what the accumulator loses

        def exact(a, sa, c, sc):
            return (a.double() @ c.double().t() * sa.double() * sc.double()).float()

        def accumulated(fast):
            return lambda a, sa, c, sc: torch._scaled_mm(
                a, c.t(), sa, sc, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        def small(seed):
            return (
                *eight_bits.quantize_rows(randn(512, k, seed=seed), None, k),
                *weight(randn(1024, k, seed=seed + 9), None, k),
            )

        bench(
            f"error of the accumulator, K={k}",
            {"fp64": exact, "fast": accumulated(True), "slow": accumulated(False)},
            small,
            bytes=1536 * k,
            flops=2 * 512 * 1024 * k,
            check=relative_error,
        )

    systems = {"fp32": lambda g, w: g @ w.float()}
    systems |= {
        f"{name} by {'row' if by_row else 'tensor'}": cast(dtype, by_row)
        for name, dtype in (("e4m3", E4M3), ("e5m2", torch.float8_e5m2))
        for by_row in (True, False)
    }
    bench(
        "error of a gradient's format",
        systems,
        gradient,
        bytes=T * 4096,
        check=lambda v, r: float(((v - r).norm(dim=1) / r.norm(dim=1)).mean()),
    )


def quantise(bench):
    """Activations and gradients, with an adapter's columns."""
    for k, ranks in ((4096, 48), (6144, 48), (14336, 16), (28672, 32)):
        tokens, k, first = bench.size(T), bench.size(k), k == 4096
        width = pad(k + 3 * ranks, 128)

        def template(x, extra, width=width, **options):
            return eight_bits.quantize_rows(x, extra, width, **options)

        bench(
            f"quantise {tokens} rows of {k}",
            {
                INDUCTOR: compiled(lambda x, e, width=width: in_torch(x, e, width)),
                TEMPLATE: template,
                **bench.tiles(
                    lambda: {
                        f"{n} warps": lambda x, e, n=n: template(x, e, tile=Tile(0, num_warps=n))
                        for n in (2, 4, 8, 16, 32)
                    }
                ),
            },
            lambda seed, k=k, ranks=ranks: (
                randn(tokens, k, seed=seed),
                randn(tokens, ranks, seed=seed, dtype=torch.float32),
            ),
            bytes=tokens * (3 * k + 7 * ranks),
            check=lambda v, r: relative_error((v[0].float(), v[1]), (r[0].float(), r[1])),
            shown="rows and adapters to FP8" if first else "",
        )


def nf4_in_torch(n, k, transposed):
    """What write_nf4 does, for Inductor to fuse."""
    table = torch.tensor(CODES["nf4"], device=DEVICE)

    def call(packed, absmax, code, outer, offset):
        scales = code[absmax.int()] * outer.repeat_interleave(256)[: len(absmax)] + offset
        nibbles = torch.cat([packed >> 4, packed & 15], 1).int()
        weight = (table[nibbles].view(-1, 64) * scales[:, None]).view(n, k)
        return (weight.t().contiguous() if transposed else weight).div(WEIGHT_SCALE).clamp(-448, 448).to(E4M3)

    return call


def tiles(n, k, transposed):
    plain = (1, 2048, 2), (1, 2048, 4), (2, 1024, 4), (4, 512, 4), (4, 1024, 8), (8, 512, 8), (1, 4096, 8), (16, 128, 4)
    turned = (
        (64, 64, 4),
        (128, 32, 4),
        (128, 64, 4),
        (128, 64, 8),
        (128, 128, 8),
        (256, 32, 8),
        (256, 64, 8),
        (64, 128, 4),
    )
    return {
        f"{rows}x{columns}, {warps} warps": nf4_to_fp8(n, k, transposed, tile=Tile(columns, rows=rows, num_warps=warps))
        for rows, columns, warps in (turned if transposed else plain)
    }


def in_floats(value, reference):
    return relative_error(value.float(), reference.float())


def write(bench):
    """Frozen weights in either direction, and the adapter's columns beside them."""
    for n, k in ((14336, 4096), (4096, 14336), (1024, 4096)):
        n, k, first = bench.size(n), bench.size(k), (n, k) == (14336, 4096)
        for transposed in (False, True):
            name = "NF4 to FP8, transposed" if transposed else "NF4 to FP8"
            bench(
                f"{name}, {n}x{k}",
                {
                    INDUCTOR: compiled(nf4_in_torch(n, k, transposed)),
                    TEMPLATE: nf4_to_fp8(n, k, transposed),
                    **bench.tiles(lambda: tiles(n, k, transposed)),
                },
                packed_nf4(n, k),
                bytes=n * k * (0.5 + 1 / 64 + 1),
                check=in_floats,
                shown=name if first else "",
            )

    n, k = bench.size(14336), bench.size(4096)
    for transposed in (False, True):
        rows, columns = (k, n) if transposed else (n, k)
        out, scales = (
            torch.zeros(rows, columns + 128, dtype=E4M3, device=DEVICE),
            torch.full((1, rows), WEIGHT_SCALE, device=DEVICE),
        )

        def template(w, transposed=transposed, out=out, scales=scales):
            eight_bits.write_dense(w.t() if transposed else w, scales, out)
            return out[:, : out.shape[1] - 128]

        name = "bf16 to FP8, transposed" if transposed else "bf16 to FP8"
        bench(
            f"{name}, {n}x{k}",
            {
                INDUCTOR: compiled(
                    lambda w, turn=transposed: (
                        (w.t().contiguous() if turn else w).float().div(WEIGHT_SCALE).clamp(-448, 448).to(E4M3)
                    )
                ),
                TEMPLATE: template,
            },
            lambda s: (randn(n, k, seed=s),),
            bytes=3 * n * k,
            check=in_floats,
            shown=name,
        )

    def adapter(b, largest):
        scale = torch.maximum(b.abs().amax(1, keepdim=True), largest).clamp_min(1e-30) / 448
        v = b / scale
        high = v.to(E4M3)
        return torch.cat(
            [high, high, (v - high.float()).to(E4M3), b.new_zeros((b.shape[0], 128 - 6 * RANK), dtype=E4M3)], 1
        ), scale

    bench(
        f"adapter's columns beside {2 * n}x{k}",
        {
            INDUCTOR: compiled(adapter),
            TEMPLATE: lambda b, largest: eight_bits.begin_weight(largest, b, 2 * n, k, k + 128),
        },
        lambda s: (randn(2 * n, 2 * RANK, seed=s, dtype=torch.float32), torch.ones((), device=DEVICE)),
        bytes=2 * n * (128 + 8 * RANK),
        check=lambda v, r: relative_error(v[0][:, -128:].float(), r[0][:, -128:].float()),
        shown="an adapter's columns in FP8",
    )


def run(bench):
    quantise(bench)
    write(bench)
    if not bench.dry:
        products(bench)
        errors(bench)


if __name__ == "__main__":
    main({"eight_bits": run})
