"""Rotary embedding of q and k out of a fused projection: bytes are one read and one write of both, and the tables."""

import torch
from _harness import DEVICE, INDUCTOR, TEMPLATE, Before, attempt, backward_of, compiled, main, randn, relative_error

from tunecompile.templates import rope
from tunecompile.templates._tiles import Tile


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat([-x2, x1], -1)


def views(qkv, hq, hk, d):
    return [p.transpose(1, 2) for p in qkv.unflatten(-1, (-1, d)).split((hq, hk, hk), 2)]


@compiled
def reference(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def turned_back(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos - rotate_half(q) * sin, k * cos - rotate_half(k) * sin


@compiled
def reference_backward(grads, q, k, cos, sin):
    return turned_back(*grads, cos, sin)


def together(q, k, v):
    return torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], 2)


@compiled
def reference_joined(q, k, v, cos, sin):
    return together(*turned_back(q, k, cos, sin), v)


def tokens_first(x):
    """A copy [B, H, T, D] that lies as [B, T, H, D], for a kernel that works in place on this layout."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def liger():
    from liger_kernel.transformers.functional import liger_rope

    def prepare(q, k, cos, sin):
        q, k = tokens_first(q), tokens_first(k)
        return lambda: liger_rope(q, k, cos, sin)
    return Before(prepare)


def liger_backward():
    from liger_kernel.ops.rope import rope_backward

    def prepare(grads, q, k, cos, sin):
        dq, dk = (tokens_first(g) for g in grads)
        return lambda: rope_backward(dq, dk, cos, sin)[:2]
    return Before(prepare)


def unsloth():
    """Reads the fused projection as it lies, and writes elsewhere."""
    from unsloth.kernels.rope_embedding import fast_rope_embedding
    return fast_rope_embedding


def joined(function):
    """Its backward pass, and then the concatenation with dv."""
    def prepare(q, k, v, cos, sin):
        call = function.prepare((q, k), q, k, cos, sin)
        return lambda: together(*call()[:2], v)
    return Before(prepare)


def run(bench):
    batch, length = (1, 16) if bench.dry else (4, 2048)
    for hq, hk, d in ((32, 8, 128), (9, 3, 64)):
        def make(seed, hq=hq, hk=hk, d=d):
            g = torch.Generator(DEVICE).manual_seed(seed)
            angle = torch.rand(1, length, d // 2, generator=g, device=DEVICE).mul(6).repeat(1, 1, 2)
            return (*views(randn(batch, length, (hq + 2 * hk) * d, seed=seed), hq, hk, d), angle.cos().bfloat16(), angle.sin().bfloat16())

        def forward_inputs(seed, make=make):
            q, k, _, cos, sin = make(seed)
            return q, k, cos, sin

        def backward_inputs(seed, make=make):
            """Gradients as attention leaves them: heads inside tokens, each apart."""
            q, k, _, cos, sin = make(seed)
            return (tokens_first(q), tokens_first(k)), q, k, cos, sin

        def joined_inputs(seed, make=make):
            q, k, v, cos, sin = make(seed)
            return *(tokens_first(t) for t in (q, k, v)), cos, sin

        def tiles(function):
            choices = [(heads, warps) for heads in (2, 4, 8, 16, 32) for warps in (1, 2, 4, 8)]
            return bench.tiles(lambda: {f"{h} heads, {w} warps": lambda *a, t=Tile(0, rows=h, num_warps=w): function(*a, tile=t) for h, w in choices})

        def both(q, k, v, cos, sin, **options):
            return rope.backward(q, k, cos, sin, dv=v, **options)

        size = 2 * batch * length * (hq + hk) * d * 2 + 2 * length * d * 2
        name, first = f"{batch}x{length}, {hq}+{hk} heads of {d}", (hq, d) == (32, 128)
        bench(f"{name} forward", {INDUCTOR: reference, "Liger, q and k apart, in place": attempt(liger), "Unsloth": attempt(unsloth),
                                  TEMPLATE: rope.forward, **tiles(rope.forward)},
              forward_inputs, bytes=size, check=relative_error, shown="RoPE" if first else "")
        bench(f"{name} backward", {
            INDUCTOR: reference_backward, "Liger, in place": attempt(liger_backward),
            "Unsloth": attempt(lambda: backward_of(unsloth(), frozen=(2, 3))), TEMPLATE: lambda g, q, k, cos, sin: rope.backward(*g, cos, sin)},
            backward_inputs, bytes=size, check=relative_error, shown="RoPE backward" if first else "")
        bench(f"{name} backward, joined with dv", {
            INDUCTOR: reference_joined, "Liger, in place, then cat": attempt(lambda: joined(liger_backward())),
            "Unsloth, then cat": attempt(lambda: joined(backward_of(unsloth(), frozen=(2, 3)))), TEMPLATE: both, **tiles(both)},
            joined_inputs, bytes=size + 4 * batch * length * hk * d, check=relative_error, shown="RoPE backward, joined with dv" if first else "")


if __name__ == "__main__":
    main({"rope": run})
