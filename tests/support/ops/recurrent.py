"""Operands of delta rules, and what the rules are by definition: a token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.ops.checks import assert_fake_is_real, error


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


def selective_operands(rows, tokens, channels, states, initial=False, dtype=torch.float64):
    """[x, dt, a, b, c, initial]: decays from nearly all to nearly nothing."""

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype)

    made = [
        normal(rows, tokens, channels),
        normal(rows, tokens, channels).exp(),
        -normal(channels, states).exp(),
        normal(rows, tokens, states),
        normal(rows, tokens, states),
        normal(rows, channels, states) if initial else None,
    ]
    return [x if x is None else x.requires_grad_() for x in made]


def selective_recurrence(x, dt, a, b, c, initial, offsets) -> tuple[Tensor, Tensor]:
    """Mamba-1's scan."""
    state = x.new_zeros(x.shape[0], *a.shape) if initial is None else initial
    begins = () if offsets is None else offsets.tolist()
    made = []
    for t in range(x.shape[1]):
        if t in begins:
            state = state * 0
        state = state * (dt[:, t, :, None] * a).exp() + (dt[:, t] * x[:, t])[..., None] * b[:, t, None, :]
        made.append((state * c[:, t, None, :]).sum(-1))
    return torch.stack(made, 1), state


def gradients(made, leaves, seed=1) -> list[Tensor]:
    """Of a random weighting of all outputs; the same for the same outputs."""
    random = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in made]
    leaves = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return list(torch.autograd.grad(sum((x * w).sum() for x, w in zip(made, weights)), leaves))


def assert_one_rounding(rule, args):
    """Values and gradients in a narrow dtype differ from the definition in fp64 by some roundings."""
    dtype = args[0].dtype
    wide = [x.detach().double().requires_grad_() if isinstance(x, Tensor) else x for x in args]
    exact, made = recurrence(*wide), rule(*args)
    assert made[0].dtype == dtype and made[1].dtype == torch.float32
    found = [error(x, y) for x, y in zip((*made, *gradients(made, args)), (*exact, *gradients(exact, wide)))]
    assert max(found) < 20 * torch.finfo(dtype).eps, found


def assert_documents_apart(rule, args, document):
    """What stands in one document, a slice of the tokens, changes its own results alone."""
    changed = list(args)
    for place in range(5):  # all of the document
        changed[place] = args[place].detach().clone()
        changed[place][:, document] = torch.randn_like(changed[place][:, document]) if place < 3 else -0.5
    before, after = rule(*args)[0], rule(*changed)[0]
    same = torch.ones(args[0].shape[1], dtype=torch.bool)
    same[document] = False
    torch.testing.assert_close(before[:, same], after[:, same], rtol=1e-13, atol=1e-13)  # decays' sums may round apart
    assert (before - after)[:, ~same].norm() > 1


def assert_finite_when_all_is_forgotten(rule, args):
    with torch.no_grad():
        args[3].mul_(1e4)
    made = rule(*args)
    assert all(x.isfinite().all() for x in (*made, *gradients(made, args)))


def assert_fakes_are_real(rule, args):
    args = [x.detach() if isinstance(x, Tensor) else x for x in args]
    assert_fake_is_real(rule, *args)
    grad, final = (torch.randn_like(x) for x in rule(*args))
    assert_fake_is_real(rule.backward_op, grad, final, *args)
