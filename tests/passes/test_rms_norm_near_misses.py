"""What is nearly an RMSNorm, and what changes in the middle of one: neither matches."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes import run
from tests.support.passes.norms import EPS, stat
from tests.support.passes.run import family, random

PASSES = family("rms_norm")
check = partial(run.check, passes=PASSES)


def eps_outside(x, w):
    return w * (x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + EPS))


def eps_in_the_square(x, w):
    return w * (x * torch.rsqrt((x + EPS).pow(2).mean(-1, keepdim=True)))


def eps_in_the_mean(x, w):
    return w * (x * torch.rsqrt((x.pow(2) + EPS).mean(-1, keepdim=True)))


def other_dim(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + EPS))


def all_dims(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean() + EPS))


def two_dims(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + EPS))


def no_keepdim(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1) + EPS))


def a_sum(x, w):
    return w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS))


def cube(x, w):
    return w * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS))


def no_rsqrt(x, w):
    return w * (x * (x.pow(2).mean(-1, keepdim=True) + EPS))


def square_root(x, w):
    return w * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def centred(x, w):
    return w * ((x - x.mean(-1, keepdim=True)) * stat(x, w))


def of_another(x, w):
    return w * (torch.sin(x) * stat(x, w))


def inner_user(x, w):
    r = stat(x, w)
    return w * (x * r), r


def inner_variance(x, w):
    v = x.pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(v + EPS)) + v


def tensor_eps(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w.abs().sum()))


def negated(x, w):
    return w * (x * -stat(x, w))


def narrow_then_wide(x, w):
    h = x.half()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


MUTATIONS = [
    eps_outside,
    eps_in_the_square,
    eps_in_the_mean,
    other_dim,
    all_dims,
    two_dims,
    no_keepdim,
    a_sum,
    cube,
    no_rsqrt,
    square_root,
    centred,
    of_another,
    inner_user,
    inner_variance,
    tensor_eps,
    negated,
    narrow_then_wide,
]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_does_not_match(mutation):
    check(mutation, random(8, 8), random(8), expect={}, tol=1e-5 if mutation is not narrow_then_wide else 5e-3)


def test_narrow_statistics():
    def fn(x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))

    check(fn, random(2, 3, 8, dtype=torch.bfloat16), random(8, dtype=torch.bfloat16), expect={}, tol=2e-2)


def test_torch_norm_of_several_dims():
    check(lambda x, w: F.rms_norm(x, (3, 8), w, EPS), random(2, 3, 8), random(3, 8), expect={})
    check(lambda x, w, b: F.layer_norm(x, (8,), w, b), random(2, 3, 8), random(8), random(8), expect={})


def between(mutate):
    def fn(x, w):
        y = x * 1.0
        variance = y.pow(2).mean(-1, keepdim=True)
        mutate(y)
        return w * (y * torch.rsqrt(variance + EPS))

    return fn


@pytest.mark.parametrize(
    "mutate",
    [
        lambda y: y.add_(1),
        lambda y: y.__setitem__((0, 0), 5.0),
        lambda y: torch.sin_(y),
        lambda y: F.relu(y, inplace=True),
        lambda y: y[0].zero_(),
        lambda y: F.relu_(y),
        lambda y: torch.add(y, 1, out=y),
        lambda y: y.__ipow__(2),
        lambda y: F.silu(y, True),
        lambda y: F.dropout(y, 1.0, True, True),
    ],
)
def test_never_across_a_mutation(mutate):
    check(between(mutate), random(4, 8, grad=False), random(8, grad=False), expect={})


def test_never_across_a_change_of_grad_mode():
    def fn(x, w):
        with torch.no_grad():
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return w * (x * scale)

    check(fn, random(4, 8), random(8), expect={})


def test_detached_statistics():
    check(lambda x, w: w * (x * stat(x, w).detach()), random(4, 8), random(8), expect={})
    check(
        lambda x, w: w * (x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + EPS)),
        random(4, 8),
        random(8),
        expect={},
    )
