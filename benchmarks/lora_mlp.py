"""Backward of a gated MLP between its two large products: bytes are three reads and two writes of [T, F]."""

import torch
from _harness import Bench, compiled, randn, relative_error

from tunecompile.templates import lora_mlp, swiglu
from tunecompile.templates._tiles import Tile

bench = Bench("lora_mlp")
RANK = 16


def sums(both, act, down, xa):
    dg, du = both.split(act.shape[1], 1)
    xg, xu = xa.split(RANK, 1)
    return both, xg.t() @ dg, xu.t() @ du, down.t() @ act


@compiled
def reference(grad, gate_up, down, xa):
    gate, up = gate_up.split(grad.shape[1], 1)
    g, d = gate.float(), grad.float()
    s = torch.sigmoid(g)
    both = torch.cat([(d * up.float() * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(gate.dtype)], -1)
    return sums(both, (g * s * up).to(gate.dtype), down, xa)


@compiled
def apart(grad, gate_up, down, xa):
    both, act = swiglu.backward(grad, *gate_up.split(grad.shape[1], 1), joined=True, recompute=True)
    return sums(both, act, down, xa)


@compiled
def joined(*args):
    return lora_mlp.backward(*args, (RANK, RANK))


for rows, columns in ((8192, 14336), (1024, 14336), (8192, 8192), (1024, 8192)):
    def make(seed, rows=rows, columns=columns):
        shapes = (rows, columns), (rows, 2 * columns), (rows, RANK), (rows, 2 * RANK)
        return tuple(randn(*shape, seed=10 * seed + i) for i, shape in enumerate(shapes))

    tiles = {}
    if bench.options.sweep:
        for block in (64, 128, 256):
            for step in (16, 32, 64):
                for span in (256, 512, 1024, 2048):
                    for warps in (4, 8):
                        for stages in (1, 2, 3):
                            if 512 * warps <= block * step <= 2048 * warps and columns // block * (rows / span) >= 132 and span <= rows:
                                tiles[f"block {block}, step {step}, rows {span}, {warps} warps, {stages} stages"] = \
                                    Tile(block, rows=span, num_warps=warps, num_stages=stages, step=step)
    bench(f"{rows}x{columns}", {
        "reference, torch.compile": reference, "swiglu template and three products": apart, "template": joined,
        **{k: (lambda *a, t=t: lora_mlp.backward(*a, (RANK, RANK), tile=t)) for k, t in tiles.items()},
    }, make, bytes=2 * 5 * rows * columns, flops=2 * 3 * rows * columns * RANK, check=relative_error)
bench.show()
