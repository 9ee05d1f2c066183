"""Gated activations, whatever feeds them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.passes import run
from tests.support.passes.run import family, random

check = partial(run.check, passes=family("swiglu"))


class Mlp(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate, self.up, self.down, self.act = (
            nn.Linear(8, 12, bias=False),
            nn.Linear(8, 12, bias=False),
            nn.Linear(12, 8, bias=False),
            act,
        )

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), F.silu, F.gelu])
def test_modules(act):
    mlp = Mlp(act)
    check(mlp, random(2, 3, 8), expect={"gated_activation": 1}, parameters=list(mlp.parameters()))


def fused(x, weight):
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return up * F.silu(gate)


def split(x, weight):
    gate, up = F.linear(x, weight).split(6, dim=-1)
    return F.silu(gate) * up


def sliced(x, weight):
    y = F.linear(x, weight)
    return torch.mul(F.silu(y[..., :6]), y[..., 6:])


@pytest.mark.parametrize("spelling", [fused, split, sliced])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_projection_for_both(spelling, dtype):
    check(
        spelling,
        random(2, 3, 8, dtype=dtype),
        random(12, 8, dtype=dtype),
        expect={"gated_activation": 1},
        tol=1e-5 if dtype == torch.float32 else 1.2e-2,
    )


SPELLINGS = [
    lambda g, u: F.silu(g) * u,
    lambda g, u: u * F.silu(g),
    lambda g, u: g * torch.sigmoid(g) * u,
    lambda g, u: u * (g * g.sigmoid()),
    lambda g, u: F.gelu(g) * u,
    lambda g, u: F.gelu(g, approximate="none") * u,
    lambda g, u: F.gelu(g, approximate="tanh") * u,
    lambda g, u: torch.sigmoid(g) * g * u,
    lambda g, u: F.silu(g, inplace=False) * u,
    lambda g, u: F.silu(g) * F.silu(u),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_matches(spelling):
    check(spelling, random(2, 3, 8), random(2, 3, 8), expect={"gated_activation": 1})


@pytest.mark.parametrize("spelling", [SPELLINGS[0], SPELLINGS[6]])
def test_dynamic_shapes(spelling):
    check(spelling, random(2, 3, 8), random(2, 3, 8), expect={"gated_activation": 1}, dynamic=True)


def test_both_from_one_tensor():
    check(lambda g: F.silu(g) * g, random(2, 3, 8), expect={"gated_activation": 1})


MUTATIONS = [
    lambda g, u: F.silu(g) + u,
    lambda g, u: F.silu(g) / u,
    lambda g, u: F.relu(g) * u,
    lambda g, u: torch.sigmoid(g) * u,
    lambda g, u: F.silu(g) * 2.0 + u,
    lambda g, u: (lambda a: a * u + a)(F.silu(g)),
    lambda g, u: (F.silu(g) * u, F.silu(u))[0] if False else (lambda a: (a * u, a))(F.silu(g)),
    lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    lambda g, u: g * torch.sigmoid(u) * u * 1.0,
    lambda g, u: F.silu(-g) / u,
    lambda g, u: F.mish(g) * u,
    lambda g, u: F.silu(g) * u[..., :1],
    lambda g, u: F.silu(g[:1]) * u,
    lambda g, u: F.silu(g) * u[0],
]


@pytest.mark.parametrize("mutation", range(len(MUTATIONS)))
def test_does_not_match(mutation):
    check(MUTATIONS[mutation], random(2, 3, 8), random(2, 3, 8), expect={})


def test_an_activation_without_a_gate_is_no_near_miss():
    def mlp(x, up, down):
        return F.linear(F.dropout(F.gelu(F.linear(x, up)).to(x.dtype), 0.0), down)

    seen = check(mlp, random(2, 3, 8), random(12, 8), random(8, 12), expect={})
    assert not seen.refused
    seen = check(lambda g, u: (F.silu(g) + 1) * u, random(2, 3, 8), random(2, 3, 8), expect={})
    assert seen.refused


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_two_dtypes(dtypes):
    check(
        lambda g, u: F.silu(g) * u,
        random(2, 3, 8, dtype=dtypes[0]),
        random(2, 3, 8, dtype=dtypes[1]),
        expect={},
        tol=1e-2,
    )


def test_never_across_a_mutation():
    def before(g, u):
        u = u * 1.0
        a = F.silu(g)
        u.add_(1.0)
        return a * u

    def activation(g, u):
        a = F.silu(g)
        a.add_(1.0)
        return a * u

    def gate(g, u):
        g = g * 1.0
        s = torch.sigmoid(g)
        g.add_(1.0)
        return g * s * u

    for fn in (before, activation, gate):
        check(fn, random(2, 3, 8, grad=False), random(2, 3, 8, grad=False), expect={})


def test_inplace_activation():
    check(lambda g, u: F.silu(g * 1.0, inplace=True) * u, random(2, 3, 8), random(2, 3, 8))
    mlp = Mlp(nn.SiLU(inplace=True))
    check(mlp, random(2, 3, 8), parameters=list(mlp.parameters()))


def test_input_by_name():
    check(lambda g, u: F.silu(input=g) * u, random(2, 3, 8), random(2, 3, 8))


def test_gate_of_a_gate():
    check(
        lambda a, b, c: F.silu(F.silu(a) * b) * c,
        random(4, 8),
        random(4, 8),
        random(4, 8),
        expect={"gated_activation": 2},
    )


def test_result_is_mutated_afterwards():
    check(lambda g, u: (F.silu(g) * u).mul_(2.0), random(2, 3, 8), random(2, 3, 8), expect={"gated_activation": 1})


def clamped(both, alpha=1.702, limit=7.0, least=-7.0):
    gate, up = both[..., ::2].clamp(min=None, max=limit), both[..., 1::2].clamp(min=least, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_clamped_gate(dtype):
    both = random(2, 3, 12, dtype=dtype, scale=6.0)
    tol = 1e-5 if dtype == torch.float32 else 2e-2
    check(clamped, both, expect={"clamped_gate": 1}, tol=tol)
    check(lambda x: clamped(x, alpha=1.0, limit=2, least=-2), both, expect={"clamped_gate": 1}, tol=tol)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: clamped(x, least=-6.0),
        lambda x: clamped(x, limit=-1.0, least=1.0),
        lambda x: clamped(x, alpha=x[:, :, :1]),
        lambda x: (x[..., 1::2].clamp(-7.0, 7.0) + 1) * x[..., ::2] * torch.sigmoid(x[..., ::2].clamp(max=7.0) * 1.7),
    ],
)
def test_another_clamped_gate(other):
    """Another least value, an alpha that is a tensor, a gate that is not clamped itself."""
    x = random(2, 3, 12, scale=6.0)
    check(other, x, expect={})
