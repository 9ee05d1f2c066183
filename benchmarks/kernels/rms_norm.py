"""The backward of RMS norm: bytes are two reads and one write, and a residual adds one read."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._harness import INDUCTOR, TEMPLATE, attempt, backward_of, compiled, main, randn, relative_error
from tunecompile.templates import norms
from tunecompile.templates._tiles import Tile

EPS = 1e-5


def gradients(grad, x, weight):
    xf = x.float()
    inverse = torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + EPS)
    xhat, g = xf * inverse, grad.float() * weight.float()
    return inverse * (g - xhat * (g * xhat).mean(-1, keepdim=True)), xhat


@compiled
def reference_backward(grad, x, weight):
    return gradients(grad, x, weight)[0].to(x.dtype)


@compiled
def reference_backward_weight(grad, x, weight):
    dx, xhat = gradients(grad, x, weight)
    return dx.to(x.dtype), (grad.float() * xhat).flatten(0, -2).sum(0)


@compiled
def reference_backward_residual(grads, x, weight):
    return (gradients(grads[0], x, weight)[0] + grads[1].float()).to(x.dtype)


def liger():
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x, weight: liger_rms_norm(x, weight, EPS)


def liger_residual():
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return lambda x, residual, weight: liger_fused_add_rms_norm(x, residual, weight, EPS)


def liger_backward_residual():
    """The sum's gradient is that of x and of the residual alike, so the residual asks for none."""
    function = liger_residual()
    blank = {}

    def forward(total, weight):
        residual = blank.setdefault(total.shape, torch.zeros_like(total))
        return function(total, residual, weight)

    return backward_of(forward, frozen=(1,))


def unsloth():
    from unsloth.kernels.rms_layernorm import Fast_RMS_Layernorm

    return lambda x, weight: Fast_RMS_Layernorm.apply(x, weight, EPS, False)


def run(bench):
    for shape in ((8192, 4096), (4, 2048, 40, 128)):
        heads = len(shape) == 4
        shape = tuple(bench.size(n) for n in (shape if not (heads and bench.dry) else (2, 16, 4, 128)))
        size, name, w = 2 * torch.Size(shape).numel(), "x".join(map(str, shape)), randn(shape[-1], seed=99)

        def two(seed, shape=shape, w=w):
            return randn(*shape, seed=seed), randn(*shape, seed=seed + 50), w

        def pair(seed, shape=shape, w=w):
            return (randn(*shape, seed=seed), randn(*shape, seed=seed + 50)), randn(*shape, seed=seed + 70), w

        def tiles(function, heads=heads):
            choices = [
                (r, n) for r in ((4, 8, 16, 32) if heads else (1, 2)) for n in ((2, 4, 8) if heads else (2, 4, 8, 16))
            ]
            return bench.tiles(
                lambda: {
                    f"{r} rows, {n} warps": lambda *a, t=Tile(0, rows=r, num_warps=n): function(*a, tile=t)
                    for r, n in choices
                }
            )

        def backward(grad, x, w, **options):
            return norms.backward(grad, x, w, EPS, centred=False, round_first=True, **options)[0]

        def both(grad, x, w, **options):
            return norms.backward(grad, x, w, EPS, centred=False, round_first=True, sums=1, **options)

        def shown(what, heads=heads):
            return "" if heads else what

        bench(
            f"{name} backward",
            {
                INDUCTOR: reference_backward,
                "Liger, in place": attempt(lambda: backward_of(liger(), frozen=(1,))),
                "Unsloth": attempt(lambda: backward_of(unsloth(), frozen=(1,))),
                TEMPLATE: backward,
                **tiles(backward),
            },
            two,
            bytes=3 * size,
            check=relative_error,
            shown=shown("RMS norm backward"),
        )
        bench(
            f"{name} backward + weight",
            {
                INDUCTOR: reference_backward_weight,
                "Liger, in place": attempt(lambda: backward_of(liger())),
                "Unsloth": attempt(lambda: backward_of(unsloth())),
                TEMPLATE: both,
                **tiles(both),
            },
            two,
            bytes=3 * size,
            check=relative_error,
            shown=shown("RMS norm backward, weight trained"),
        )
        if heads:
            continue
        bench(
            f"{name} residual + backward",
            {
                INDUCTOR: reference_backward_residual,
                "Liger": attempt(liger_backward_residual),
                TEMPLATE: lambda grads, x, w: backward(grads[0], x, w, residual_grad=grads[1]),
            },
            pair,
            bytes=4 * size,
            check=relative_error,
            shown="residual and RMS norm backward",
        )


if __name__ == "__main__":
    main({"rms_norm": run})
