"""Rotary embedding of q and k out of a fused projection: bytes are one read and one write of both, and the tables."""

import torch
from _harness import Bench, attempt, compiled, randn, relative_error

from tunecompile.templates import rope
from tunecompile.templates._tiles import Tile

bench = Bench("rope")
B, T = 4, 2048


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat([-x2, x1], -1)


def views(qkv, hq, hk, d):
    return [p.transpose(1, 2) for p in qkv.unflatten(-1, (-1, d)).split((hq, hk, hk), 2)]


@compiled
def reference(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@compiled
def reference_joined(q, k, v, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = q * cos - rotate_half(q) * sin, k * cos - rotate_half(k) * sin
    return torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], 2)


def liger():
    from liger_kernel.transformers.functional import liger_rope
    return lambda q, k, cos, sin: liger_rope(q.clone(), k.clone(), cos, sin)  # it works in place


for hq, hk, d in ((32, 8, 128), (9, 3, 64)):
    def make(seed, hq=hq, hk=hk, d=d):
        g = torch.Generator("cuda").manual_seed(seed)
        angle = torch.rand(1, T, d // 2, generator=g, device="cuda").mul(6).repeat(1, 1, 2)
        return (*views(randn(B, T, (hq + 2 * hk) * d, seed=seed), hq, hk, d), angle.cos().bfloat16(), angle.sin().bfloat16())

    tiles = {}
    if bench.options.sweep:
        for heads in (2, 4, 8, 16, 32):
            for warps in (1, 2, 4, 8):
                tiles[f"{heads} heads, {warps} warps"] = Tile(0, rows=heads, num_warps=warps)
    size = 2 * B * T * (hq + hk) * d * 2 + 2 * T * d * 2
    name = f"{B}x{T}, {hq}+{hk} heads of {d}"
    bench(f"{name} forward", {
        "reference, torch.compile": reference, "Liger": attempt(liger), "template": rope.forward,
        **{k: (lambda *a, t=t: rope.forward(*a, tile=t)) for k, t in tiles.items()},
    }, lambda s, make=make: (lambda q, k, v, c, s: (q, k, c, s))(*make(s)), bytes=size, check=relative_error)
    joined = lambda q, k, v, c, s, **o: rope.backward(q, k, c, s, dv=v, **o)  # noqa: E731
    bench(f"{name} backward, joined with dv", {
        "reference, torch.compile": reference_joined, "template": joined, **{k: (lambda *a, t=t: joined(*a, tile=t)) for k, t in tiles.items()},
    }, make, bytes=size + 4 * B * T * hk * d, check=relative_error)
bench.show()
