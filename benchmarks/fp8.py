"""FP8 products of the 8B shapes at 8,192 tokens: what scales, accumulation and the adapter's columns cost, and what makes the operands.

Decides, for tunecompile/ops/fp8.py: scales by tensor or by row, fast accumulation or not, the width rows are padded to, who
quantises. Products beside bf16's; the error is that of the product of the same FP8 values (accumulation and output rounding only).
"""

import torch
from _harness import Bench, compiled, packed_nf4, randn, relative_error

from tunecompile.templates import fp8, nf4
from tunecompile.templates._tiles import Tile

bench = Bench("fp8")
T, RANK, E4M3 = 8192, 16, torch.float8_e4m3fn
SHAPES = {  # product -> (columns out, what is summed, ranks of its siblings)
    "qkv": (6144, 4096, 48), "o": (4096, 4096, 16), "gate|up": (28672, 4096, 32), "down": (4096, 14336, 16),
    "dX of qkv": (4096, 6144, 48), "dX of gate|up": (4096, 28672, 32), "dX of down": (14336, 4096, 16),
}


def pad(width, to):
    return -(-width // to) * to


def operands(n, k, ranks):
    """x, w in bf16, the adapter's factors in fp32, and both operands in e4m3 with their scales by width: k, without the adapter, and wider."""
    def make(seed):
        x, w = randn(T, k, seed=seed), randn(n, k, seed=seed + 100) * 0.02
        xa, b = randn(T, ranks, seed=seed, dtype=torch.float32), randn(n, ranks, seed=seed, dtype=torch.float32) * 1e-3
        made = {width: (*fp8.quantize_rows(x, xa if width > k else None, width), *weight(w, b if width > k else None, width))
                for width in {k, *(pad(k + 3 * ranks, to) for to in (16, 128))}}
        return x, w, xa, b, made
    return make


def weight(w, b, width):
    out, scale = fp8.begin_weight(w.abs().amax().float(), b, w.shape[0], w.shape[1], width)
    fp8.write_dense(w, scale, out)
    return out, scale


def by_row(width, fast):
    def product(x, w, xa, b, made):
        a, sa, c, sc = made[width]
        return torch._scaled_mm(a, c.t(), sa, sc, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return product


def by_tensor(width, fast):
    one = torch.ones((), device="cuda")  # its value costs nothing

    def product(x, w, xa, b, made):
        a, _, c, _ = made[width]
        return torch._scaled_mm(a, c.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return product


def then_addmm(width):
    def product(x, w, xa, b, made):
        return by_row(width, True)(x, w, xa, b, made).addmm_(xa.bfloat16(), b.bfloat16().t())
    return product


for case, (n, k, ranks) in SHAPES.items():
    widths = {to: pad(k + 3 * ranks, to) for to in (16, 128)}
    systems = {"bf16": lambda x, w, *_: x @ w.t(), "by tensor, fast": by_tensor(k, True), "by tensor, slow": by_tensor(k, False),
               "by row, fast": by_row(k, True), "by row, slow": by_row(k, False), "by row, fast, then addmm": then_addmm(k)}
    systems |= {f"by row, fast, adapter in K to {to}: +{w - k}": by_row(w, True) for to, w in widths.items()}
    systems[f"by row, slow, adapter in K to 128: +{widths[128] - k}"] = by_row(widths[128], False)
    bench(f"{case}: {n}x{k}", systems, operands(n, k, ranks), bytes=T * k + n * k + 2 * T * n, flops=2 * T * n * k)

for k in (4096, 14336, 28672):  # against fp64 products of the same values: what the accumulator loses
    def exact(a, sa, c, sc):
        return (a.double() @ c.double().t() * sa.double() * sc.double()).float()

    def accumulated(fast):
        return lambda a, sa, c, sc: torch._scaled_mm(a, c.t(), sa, sc, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def small(seed):
        return (*fp8.quantize_rows(randn(512, k, seed=seed), None, k), *weight(randn(1024, k, seed=seed + 9), None, k))

    bench(f"error of the accumulator, K={k}", {"fp64": exact, "fast": accumulated(True), "slow": accumulated(False)}, small,
          bytes=1536 * k, flops=2 * 512 * 1024 * k, check=relative_error)


def cast(dtype, by_row):
    """Rounded to that format and back, each row or the whole scaled to its range."""
    def product(g, w):
        largest = (g.abs().amax(1, keepdim=True) if by_row else g.abs().amax()).float() / torch.finfo(dtype).max
        return ((g / largest).to(dtype).float() * largest) @ w.float()
    return product


def gradient(seed):
    """Rows of sizes as far apart as tokens' gradients are, a few channels large."""
    spread = randn(T, 1, seed=seed, dtype=torch.float32).mul(2).exp() * randn(1, 4096, seed=seed + 1, dtype=torch.float32).mul(1.5).exp()
    return randn(T, 4096, seed=seed + 2, dtype=torch.float32) * spread, randn(4096, 1024, seed=seed + 3) * 0.02


systems = {"fp32": lambda g, w: g @ w.float()}
systems |= {f"{name} by {'row' if by_row else 'tensor'}": cast(dtype, by_row)
            for name, dtype in (("e4m3", E4M3), ("e5m2", torch.float8_e5m2)) for by_row in (True, False)}
bench("error of a gradient's format", systems, gradient, bytes=T * 4096, check=lambda v, r: float(((v - r).norm(dim=1) / r.norm(dim=1)).mean()))


def in_torch(x, extra, width):
    """What quantize_rows does, for Inductor to fuse."""
    largest = torch.maximum(x.abs().amax(1, keepdim=True).float(), extra.abs().amax(1, keepdim=True)).clamp_min(1e-30)
    scale = largest / 448
    e = extra / scale
    high = e.to(E4M3)
    low = (e - high.float()).to(E4M3)
    zeros = x.new_zeros((x.shape[0], width - x.shape[1] - 3 * extra.shape[1]), dtype=E4M3)
    return torch.cat([(x / scale).to(E4M3), high, low, high, zeros], 1), scale


for k, ranks in ((4096, 48), (6144, 48), (14336, 16), (28672, 32)):
    width = pad(k + 3 * ranks, 128)
    systems = {"torch.compile": compiled(lambda x, e: in_torch(x, e, width))} if k in (4096, 14336) else {}
    systems |= {"template": lambda x, e: fp8.quantize_rows(x, e, width)}
    if bench.options.sweep:
        systems |= {f"{warps} warps": lambda x, e, warps=warps: fp8.quantize_rows(x, e, width, tile=Tile(0, num_warps=warps)) for warps in (2, 4, 8, 16, 32)}
    bench(f"quantise rows of {k}", systems, lambda s: (randn(T, k, seed=s), randn(T, ranks, seed=s, dtype=torch.float32)),
          bytes=T * (3 * k + 7 * ranks), check=lambda v, r: relative_error((v[0].float(), v[1]), (r[0].float(), r[1])))


def nf4_to_fp8(n, k, transposed, **options):
    rows, columns = (k, n) if transposed else (n, k)
    out = torch.empty(rows, columns + 128, dtype=E4M3, device="cuda")
    scale = torch.full((1, rows), 1e-3, device="cuda")

    def write(packed, absmax, code, outer, offset):
        fp8.write_nf4(packed, absmax, (n, k), scale, out, transposed=transposed, absmax_code=code, absmax_scale=outer, absmax_offset=offset, **options)
    return write


for n, k in ((14336, 4096), (4096, 14336), (1024, 4096)):
    systems = {"to bf16": lambda p, a, c, s, o: nf4.dequantize(p, a, (n, k), torch.bfloat16, absmax_code=c, absmax_scale=s, absmax_offset=o),
               "to e4m3": nf4_to_fp8(n, k, False), "to e4m3, transposed": nf4_to_fp8(n, k, True)}
    if bench.options.sweep:
        for rows, columns, warps in ((1, 2048, 2), (1, 2048, 4), (2, 1024, 4), (4, 512, 4), (4, 1024, 8), (8, 512, 8), (1, 4096, 8), (16, 128, 4)):
            systems[f"{rows}x{columns}, {warps} warps"] = nf4_to_fp8(n, k, False, tile=Tile(columns, rows=rows, num_warps=warps))
        for rows, columns, warps in ((64, 64, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 32, 8), (256, 64, 8), (64, 128, 4)):
            systems[f"{rows}x{columns}, {warps} warps, transposed"] = nf4_to_fp8(n, k, True, tile=Tile(columns, rows=rows, num_warps=warps))
    bench(f"NF4 {n}x{k}", systems, packed_nf4(n, k), bytes=n * k * (0.5 + 1 / 64 + 1))

n, k = 14336, 4096
dense = torch.empty(n, k + 128, dtype=E4M3, device="cuda")
turned = torch.empty(k, n + 128, dtype=E4M3, device="cuda")
scales = {rows: torch.full((1, rows), 1e-3, device="cuda") for rows in (n, k)}
systems = {"template": lambda w: fp8.write_dense(w, scales[n], dense), "template, transposed": lambda w: fp8.write_dense(w.t(), scales[k], turned),
           "largest (torch.compile)": compiled(lambda w: w.abs().amax().float())}
bench(f"bf16 {n}x{k} to e4m3", systems, lambda s: (randn(n, k, seed=s),), bytes=3 * n * k)
b = randn(n, RANK, dtype=torch.float32)
bench("adapter's columns beside 28672x4096", {"template": lambda b, largest: fp8.begin_weight(largest, b, 2 * n, k, k + 128)},
      lambda s: (randn(2 * n, 2 * RANK, seed=s, dtype=torch.float32), torch.ones((), device="cuda")), bytes=2 * n * (128 + 8 * RANK))
bench.show()
