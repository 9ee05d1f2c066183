"""The gated delta rule (not in Triton's interpreter, which multiplies no bf16): bytes are what has to be read and written once, the operands, the result, and their gradients."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._harness import TEMPLATE, attempt, main, randn, relative_error
from tunecompile.ops import gated_delta_rule
from tunecompile.templates.recurrent import delta_rule

CHUNKS = "torch, in chunks"  #: the op's reference
SCALE = 0.125


def operands(rows, tokens, shared, heads, width, seed):
    """(q, k, v, g, beta): q and k of length 1."""
    q, k = (F.normalize(randn(rows, tokens, shared, width, seed=seed + i).float(), dim=-1) for i in range(2))
    v = randn(rows, tokens, heads, width, seed=seed + 2)
    g, beta = (randn(rows, tokens, heads, seed=seed + 3 + i).float() for i in range(2))
    return q.to(v.dtype), k.to(v.dtype), v, -g.abs(), beta.sigmoid()


def fla():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=SCALE)[0]


def fla_backward():
    forward = fla()

    def call(grad, *given):
        leaves = [x.detach().requires_grad_() for x in given]
        return torch.autograd.grad(forward(*leaves), leaves, grad)

    return call


def backward(grad, q, k, v, g, beta):
    final = torch.zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3], device=q.device)
    made = delta_rule.backward(grad, final, q, k, v, g, beta, scale=SCALE)
    made[:2] = [x.unflatten(2, (q.shape[2], -1)).float().sum(3).to(q.dtype) for x in made[:2]]
    return made


def reference_backward(grad, q, k, v, g, beta):
    final = torch.zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3], device=q.device)
    return gated_delta_rule.backward_op.reference(grad, final, q, k, v, g, beta, None, None, SCALE, 0.0)[:5]


def run(bench):
    for rows, tokens in ((4, 2048), (1, 8192)):
        tokens, first = bench.size(tokens), rows == 4
        shared, heads, width = (16, 32, 128) if tokens > 1000 else (1, 2, 16)
        size, shape = 2 * rows * tokens * width, (rows, tokens, shared, heads, width)

        def given(seed, shape=shape):
            return operands(*shape, seed)

        def with_gradient(seed, shape=shape):
            rows, tokens, _, heads, width = shape
            return (randn(rows, tokens, heads, width, seed=seed + 50), *operands(*shape, seed))

        bench(
            f"{rows}x{tokens}, {heads} heads of {width}, forward",
            {
                CHUNKS: lambda *args: gated_delta_rule.reference(*args, None, None, SCALE, 0.0)[0],
                "fla": attempt(fla),
                TEMPLATE: lambda *args: delta_rule.forward(*args, scale=SCALE)[0],
            },
            given,
            bytes=size * (2 * shared + 2 * heads),
            check=relative_error,
            shown="gated delta rule" if first else "",
        )
        bench(
            f"{rows}x{tokens}, {heads} heads of {width}, backward",
            {CHUNKS: reference_backward, "fla, forward and backward": attempt(fla_backward), TEMPLATE: backward},
            with_gradient,
            bytes=size * (4 * shared + 3 * heads),
            check=relative_error,
            shown="gated delta rule backward" if first else "",
        )


if __name__ == "__main__":
    main({"delta_rule": run})
