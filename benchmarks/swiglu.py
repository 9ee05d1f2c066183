"""Gated activation: bytes are two reads and one write forward, three reads and two writes backward."""

import torch
import torch.nn.functional as F
from _harness import Bench, attempt, compiled, randn, relative_error

from tunecompile.templates import swiglu
from tunecompile.templates._tiles import Tile

bench = Bench("swiglu")


@compiled
def reference(gate, up):
    return F.silu(gate) * up


@compiled
def reference_backward(grad, gate, up):
    g, d = gate.float(), grad.float()
    s = torch.sigmoid(g)
    return torch.cat([(d * up.float() * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(gate.dtype)], -1)


def liger():
    from liger_kernel.transformers.functional import liger_swiglu
    return lambda gate, up: liger_swiglu(gate.contiguous(), up.contiguous())


def unsloth():
    from unsloth.kernels.swiglu import swiglu_fg_kernel
    return lambda gate, up: swiglu_fg_kernel(gate.contiguous()[None], up.contiguous()[None])[0]


for rows, columns in ((8192, 14336), (1024, 14336), (8192, 1536)):
    def halves(seed, rows=rows, columns=columns):
        return randn(rows, 2 * columns, seed=seed).split(columns, 1)

    def three(seed, rows=rows, columns=columns):
        return (randn(rows, columns, seed=seed + 50), *halves(seed, rows, columns))

    tiles = {}
    if bench.options.sweep:
        for block in (512, 1024, 2048, 4096, 8192):
            for warps in (2, 4, 8, 16):
                if block >= 128 * warps:
                    tiles[f"block {block}, {warps} warps"] = Tile(block, num_warps=warps)
    size = 2 * rows * columns
    bench(f"{rows}x{columns} forward", {
        "reference, torch.compile": reference, "Liger (contiguous inputs copied)": attempt(liger), "Unsloth (copied)": attempt(unsloth),
        "template": swiglu.forward, **{k: (lambda *a, t=t: swiglu.forward(*a, tile=t)) for k, t in tiles.items()},
    }, halves, bytes=3 * size, check=relative_error)
    joined = lambda d, g, u, **o: swiglu.backward(d, g, u, joined=True, **o)  # noqa: E731
    bench(f"{rows}x{columns} backward, joined", {
        "reference, torch.compile": reference_backward, "template": joined, **{k: (lambda *a, t=t: joined(*a, tile=t)) for k, t in tiles.items()},
    }, three, bytes=5 * size, check=relative_error)
bench.show()
