"""RMS norm: bytes are one read and one write forward, two reads and one write backward (a residual adds one of each)."""

import torch
from _harness import Bench, attempt, compiled, randn, relative_error

from tunecompile.templates import rms_norm
from tunecompile.templates._tiles import Tile

bench = Bench("rms_norm")
EPS = 1e-5


@compiled
def reference(x, weight):
    xf = x.float()
    return weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@compiled
def reference_residual(x, weight, residual):
    total = x + residual
    xf = total.float()
    return weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype), total


def _backward(grad, x, weight):
    xf = x.float()
    inverse = torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + EPS)
    xhat, g = xf * inverse, grad.float() * weight.float()
    return (inverse * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype), xhat


@compiled
def reference_backward(grad, x, weight):
    return _backward(grad, x, weight)[0]


@compiled
def reference_backward_weight(grad, x, weight):
    dx, xhat = _backward(grad, x, weight)
    return dx, (grad.float() * xhat).flatten(0, -2).sum(0)


def liger():
    from liger_kernel.transformers.functional import liger_rms_norm
    return lambda x, weight: liger_rms_norm(x, weight, EPS)


def unsloth():
    from unsloth.kernels.rms_layernorm import Fast_RMS_Layernorm
    return lambda x, weight: Fast_RMS_Layernorm.apply(x, weight, EPS, False)


def tiles(function, choices):
    if not bench.options.sweep:
        return {}
    return {f"{rows} rows, {warps} warps": (lambda *a, t=Tile(0, rows=rows, num_warps=warps): function(*a, tile=t)) for rows, warps in choices}


for shape in ((8192, 4096), (4, 2048, 40, 128)):
    heads = len(shape) == 4
    size = 2 * torch.Size(shape).numel()
    choices = [(r, w) for r in ((4, 8, 16, 32) if heads else (1, 2)) for w in ((2, 4, 8) if heads else (2, 4, 8, 16))]
    name = "x".join(map(str, shape))
    w = randn(shape[-1], seed=99)
    make = lambda s: (randn(*shape, seed=s), w)  # noqa: E731
    make2 = lambda s: (randn(*shape, seed=s), randn(*shape, seed=s + 50), w)  # noqa: E731
    forward = lambda x, w, **k: rms_norm.forward(x, w, EPS, **k)  # noqa: E731
    backward = lambda g, x, w, **k: rms_norm.backward(g, x, w, EPS, **k)  # noqa: E731
    both = lambda g, x, w, **k: rms_norm.backward(g, x, w, EPS, need_weight_grad=True, **k)  # noqa: E731
    peers = {} if heads else {"Liger": attempt(liger), "Unsloth": attempt(unsloth)}
    bench(f"{name} forward", {"reference, torch.compile": reference, **peers, "template": forward, **tiles(forward, choices)},
          make, bytes=2 * size, check=relative_error)
    if not heads:
        bench(f"{name} residual + forward", {
            "reference, torch.compile": lambda x, r, w: reference_residual(x, w, r),
            "template": lambda x, r, w: rms_norm.forward(x, w, EPS, residual=r)}, make2, bytes=4 * size, check=relative_error)
    bench(f"{name} backward", {"reference, torch.compile": reference_backward, "template": backward, **tiles(backward, choices)},
          make2, bytes=3 * size, check=relative_error)
    bench(f"{name} backward + weight", {"reference, torch.compile": reference_backward_weight, "template": both, **tiles(both, choices)},
          make2, bytes=3 * size, check=relative_error)
bench.show()
