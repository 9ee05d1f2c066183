"""Operands of delta rules, and what the rules are by definition: a token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def operands(rows, tokens, shared, heads, keys, values, initial=False, dtype=torch.float64, channels=False):
    """[q, k, v, g, beta, initial]: decays from nearly all to nearly nothing, of each channel of the keys or of all."""

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype)

    made = [
        normal(rows, tokens, shared, keys),
        normal(rows, tokens, shared, keys),
        normal(rows, tokens, heads, values),
        -normal(rows, tokens, heads, *[keys] * channels).exp(),
        normal(rows, tokens, heads).sigmoid(),
        normal(rows, heads, keys, values) if initial else None,
    ]
    return [x if x is None else x.requires_grad_() for x in made]


def recurrence(q, k, v, g, beta, initial, offsets, scale, eps, delta=True) -> tuple[Tensor, Tensor]:
    """Without the delta it is a state space's."""
    if eps:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (q, k))
    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    state = q.new_zeros(q.shape[0], heads, q.shape[3], v.shape[3]) if initial is None else initial
    begins = () if offsets is None else offsets.tolist()
    made = []
    for t in range(q.shape[1]):
        if t in begins:
            state = state * 0
        state = state * (g[:, t, :, :, None] if g.dim() == 4 else g[:, t, :, None, None]).exp()
        given = (state * k[:, t, :, :, None]).sum(-2) if delta else 0
        state = state + k[:, t, :, :, None] * ((v[:, t] - given) * beta[:, t, :, None]).unsqueeze(-2)
        made.append(scale * (state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(made, 1), state


def gradients(made, leaves, seed=1) -> list[Tensor]:
    """Of a random weighting of all outputs; the same for the same outputs."""
    random = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in made]
    leaves = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return list(torch.autograd.grad(sum((x * w).sum() for x, w in zip(made, weights)), leaves))
