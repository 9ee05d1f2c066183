"""Backward of a gated MLP between its two large products: bytes are three reads and two writes of [T, F]."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._harness import INDUCTOR, TEMPLATE, Before, attempt, compiled, main, randn, relative_error
from tunecompile.templates import lora_mlp, swiglu
from tunecompile.templates._tiles import Tile

RANK = 16


def sums(dg, du, act, down, xa):
    xg, xu = xa.split(RANK, 1)
    return xg.t() @ dg, xu.t() @ du, down.t() @ act


@compiled
def reference(grad, gate_up, down, xa):
    gate, up = gate_up.split(grad.shape[1], 1)
    g, d = gate.float(), grad.float()
    s = torch.sigmoid(g)
    both = torch.cat([(d * up.float() * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(gate.dtype)], -1)
    return *sums(*both.split(gate.shape[1], 1), (g * s * up).to(gate.dtype), down, xa), both


@compiled
def apart(grad, gate_up, down, xa):
    both, act = swiglu.backward(grad, *gate_up.split(grad.shape[1], 1), joined=True, recompute=True)
    return *sums(*both.split(act.shape[1], 1), act, down, xa), both


def unsloth():
    """Its kernel works in place on halves that lie apart; the sums are three products."""
    from unsloth.kernels.swiglu import swiglu_DWf_DW_dfg_kernel

    def prepare(grad, gate_up, down, xa):
        grad, gate, up = (
            t.clone(memory_format=torch.contiguous_format) for t in (grad, *gate_up.split(grad.shape[1], 1))
        )

        def call():
            act, du, dg = swiglu_DWf_DW_dfg_kernel(grad, gate, up)
            return sums(dg, du, act, down, xa)

        return call

    return Before(prepare)


def template(*inputs, **options):
    both, *rest = lora_mlp.backward(*inputs, (RANK, RANK), **options)
    return *rest, both


def tiles(rows, columns):
    def fits(block, step, span, warps):
        return 512 * warps <= block * step <= 2048 * warps and columns // block * (rows / span) >= 132 and span <= rows

    return {
        f"block {block}, step {step}, rows {span}, {warps} warps, {stages} stages": lambda *a, t=Tile(block, rows=span, num_warps=warps, num_stages=stages, step=step): (
            template(*a, tile=t)
        )
        for block in (64, 128, 256)
        for step in (16, 32, 64)
        for span in (256, 512, 1024, 2048)
        for warps in (4, 8)
        for stages in (1, 2, 3)
        if fits(block, step, span, warps)
    }


def run(bench):
    joined = compiled(template)  # its parts are added up by what Inductor makes of the sum, as in a layer
    for rows, columns in ((8192, 14336), (1024, 14336), (8192, 8192), (1024, 8192)):
        rows, columns, first = bench.size(rows), bench.size(columns), (rows, columns) == (8192, 14336)

        def make(seed, rows=rows, columns=columns):
            shapes = (rows, columns), (rows, 2 * columns), (rows, RANK), (rows, 2 * RANK)
            return tuple(randn(*shape, seed=10 * seed + i) for i, shape in enumerate(shapes))

        bench(
            f"{rows}x{columns}",
            {
                INDUCTOR: reference,
                "swiglu template and three products": apart,
                "Unsloth, halves apart, in place, and three products": attempt(unsloth),
                TEMPLATE: joined,
                **bench.tiles(lambda: tiles(rows, columns)),
            },
            make,
            bytes=2 * 5 * rows * columns,
            flops=2 * 3 * rows * columns * RANK,
            check=relative_error,
            shown="SwiGLU backward with the adapters' sums" if first else "",
        )


if __name__ == "__main__":
    main({"lora_mlp": run})
