"""Which activations suggest a gate, and the limits of clamped gates; on small functions without Dynamo."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes.run import family
from tests.support.passes.traced import recognized

PASSES = family("swiglu")


def seen(fn, expect, dtype=torch.float64, tol=1e-10):
    """What is said of a function of gate and up [2, 3, 8], and of a weight [8, 8]."""
    torch.manual_seed(0)
    gate, up, weight = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((2, 3, 8), (2, 3, 8), (8, 8)))
    _, context = recognized(fn, gate, up, weight, passes=PASSES, expect=expect, tol=tol)
    (tally,) = context.tallies
    assert len(tally.places) == sum(expect.values())
    return tally


def clamped(alpha=1.5, limit=2.0, least=-2.0, gate=lambda x, limit: x.clamp(min=None, max=limit), one=1):
    """As gpt-oss has it."""

    def fn(both, u, w):
        g = gate(both[..., ::2], limit)
        return (both[..., 1::2].clamp(min=least, max=limit) + one) * (g * torch.sigmoid(g * alpha))

    return fn


@pytest.mark.parametrize(
    "fn, found, reason",
    [
        (clamped(), 1, ""),
        (clamped(alpha=1, limit=2, least=-2), 1, ""),
        (clamped(least=-1.0), 0, "up is not clamped as gate is"),
        (clamped(limit=-2.0, least=2.0), 0, "up is not clamped as gate is"),
        (clamped(limit=0.0, least=0.0), 0, "up is not clamped as gate is"),
        (clamped(one=2), 0, ""),
        (clamped(gate=lambda x, limit: x.clamp(min=-9.0, max=limit)), 0, ""),
    ],
)
def test_clamped_gates(fn, found, reason):
    tally = seen(fn, {"clamped_gate": 1} if found else {})
    assert tally.found == 1 and reason in str(tally.refused) and bool(tally.refused) != bool(found)


@pytest.mark.parametrize(
    "fn, told",
    [
        (lambda g, u, w: F.silu(g) @ w, 0),
        (lambda g, u, w: F.linear(F.silu(g).to(torch.float64), w), 0),
        (lambda g, u, w: F.gelu(g).view(-1, 8) @ w, 0),
        (lambda g, u, w: (lambda a: (a @ w, a.reshape(-1, 8) @ w))(F.gelu(g)), 0),
        (lambda g, u, w: (lambda a: (a @ w, a + 1))(F.gelu(g)), 0),
        (lambda g, u, w: F.silu(g).view(-1, 8).sin(), 0),
        (lambda g, u, w: F.silu(g), 0),
        (lambda g, u, w: u + F.gelu(g), 0),
        (lambda g, u, w: torch.einsum("tk,kn->tn", F.gelu(g).view(-1, 8), w), 0),
        (lambda g, u, w: (F.silu(g).to(torch.float64) * 2 + 1) / u, 1),
        (lambda g, u, w: F.silu(g).mul_(u), 1),
        (lambda g, u, w: F.relu(g) * u, 1),
        (lambda g, u, w: u * F.relu(g), 1),
        (lambda g, u, w: F.relu(g) * 2.0, 0),
        (lambda g, u, w: F.relu(g) * u[0], 0),
        (lambda g, u, w: F.relu(g) + u, 0),
        (lambda g, u, w: (lambda a: a * a)(F.relu(g)), 0),
        (lambda g, u, w: torch.sigmoid(g) * u, 0),
        (lambda g, u, w: (g * torch.sigmoid(g)) @ w, 0),
        (lambda g, u, w: torch.sigmoid(g) * g, 0),
        (lambda g, u, w: torch.sigmoid(g) * g / u, 1),
        (lambda g, u, w: torch.sigmoid(g * 2.0) * u, 0),
        (lambda g, u, w: torch.sigmoid(g.clamp(max=1.0) * 2.0) * u, 1),
        (lambda g, u, w: torch.sigmoid(2.0 * torch.clamp(g, max=1.0)), 1),
    ],
)
def test_activations_that_suggest_a_gate(fn, told):
    """Those of an MLP without a gate do not; a product that is none is told."""
    tally = seen(fn, {})
    assert tally.found == told == len(tally.refused)


@pytest.mark.parametrize("fn", [lambda g, u, w: g * torch.sigmoid(g) * u, lambda g, u, w: u * (g.sigmoid() * g)])
def test_silu_that_is_written_out_is_counted(fn):
    """It was rewritten, and the report said that none of none was."""
    tally = seen(fn, {"gated_activation": 1})
    assert (tally.found, tally.rewritten, tally.refused) == (1, 1, [])
