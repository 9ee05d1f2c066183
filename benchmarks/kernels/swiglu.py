"""Gated activation: bytes are two reads and one write forward, three reads and two writes backward."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._harness import INDUCTOR, TEMPLATE, Before, attempt, compiled, main, randn, relative_error
from tunecompile.templates import swiglu
from tunecompile.templates._tiles import Tile


@compiled
def reference(gate, up):
    return F.silu(gate) * up


def gradients(grad, gate, up):
    g, d = gate.float(), grad.float()
    s = torch.sigmoid(g)
    return torch.cat([(d * up.float() * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(gate.dtype)], -1)


reference_backward = compiled(gradients)


def whole(gate, up):
    """The [T, 2F] buffer whose halves they are."""
    return torch.as_strided(gate, (gate.shape[0], 2 * gate.shape[1]), gate.stride(), gate.storage_offset())


def apart(*tensors):
    """Contiguous copies, the layout of projections that are not fused."""
    return [t.clone(memory_format=torch.contiguous_format) for t in tensors]


def liger():
    from liger_kernel.ops.swiglu import swiglu_forward

    def prepare(gate, up):
        gate, up = apart(gate, up)
        return lambda: swiglu_forward(gate, up)[-1]

    return Before(prepare)


def liger_fused():
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    return lambda gate, up: swiglu_fused_gate_up_forward(whole(gate, up))[1]


def liger_backward():
    from liger_kernel.ops.swiglu import swiglu_backward

    def prepare(grad, gate, up):
        gate, up = apart(gate, up)
        return lambda: swiglu_backward(gate, up, grad)

    return Before(prepare)


def liger_fused_backward():
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward

    return lambda grad, gate, up: swiglu_fused_gate_up_backward(whole(gate, up), grad)


def unsloth():
    from unsloth.kernels.swiglu import swiglu_fg_kernel

    def prepare(gate, up):
        gate, up = (t[None] for t in apart(gate, up))
        return lambda: swiglu_fg_kernel(gate, up)[0]

    return Before(prepare)


def error(value, reference):
    """Of gradients apart or joined."""
    value, reference = ((r,) if isinstance(r, torch.Tensor) else tuple(r) for r in (value, reference))
    if value[0].shape != reference[0].shape:
        value = (torch.cat(value[:2], -1), *value[2:])
    return relative_error(value, reference)


def run(bench):
    for rows, columns in ((8192, 14336), (1024, 14336), (8192, 1536)):
        rows, columns, first = bench.size(rows), bench.size(columns), (rows, columns) == (8192, 14336)

        def halves(seed, rows=rows, columns=columns):
            return randn(rows, 2 * columns, seed=seed).split(columns, 1)

        def three(seed, rows=rows, columns=columns):
            return (randn(rows, columns, seed=seed + 50), *halves(seed, rows, columns))

        def tiles(function, columns=columns):
            choices = [
                (block, warps)
                for block in (512, 1024, 2048, 4096, 8192)
                for warps in (2, 4, 8, 16)
                if block >= 128 * warps
            ]
            return {
                f"block {b}, {w} warps": lambda *a, t=Tile(b, num_warps=w): function(*a, tile=t) for b, w in choices
            }

        size, name = 2 * rows * columns, f"{rows}x{columns}"
        bench(
            f"{name} forward",
            {
                INDUCTOR: reference,
                "Liger, halves apart": attempt(liger),
                "Liger, fused": attempt(liger_fused),
                "Unsloth, halves apart": attempt(unsloth),
                TEMPLATE: swiglu.forward,
                **bench.tiles(lambda: tiles(swiglu.forward)),
            },
            halves,
            bytes=3 * size,
            check=relative_error,
            shown="SwiGLU" if first else "",
        )
        bench(
            f"{name} backward, joined",
            {
                INDUCTOR: reference_backward,
                "Liger, halves apart, in place": attempt(liger_backward),
                "Liger, fused": attempt(liger_fused_backward),
                TEMPLATE: swiglu.backward,
                **bench.tiles(lambda: tiles(swiglu.backward)),
            },
            three,
            bytes=5 * size,
            check=error,
            shown="SwiGLU backward" if first else "",
        )


if __name__ == "__main__":
    main({"swiglu": run})
