"""Rotary embedding as a product of complex numbers, in the spellings of real models, and what is no such rotation."""

from functools import partial

import pytest
import torch

from tests.support.passes import run
from tests.support.passes.rope import PASSES, Heads
from tests.support.passes.run import random

check = partial(run.check, passes=PASSES)


def angles(*shape, dtype=torch.float32):
    """cos + i sin."""
    return torch.polar(torch.ones(shape, dtype=dtype), torch.rand(shape, dtype=dtype) * 6)


def numbers(x):
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def llama4(q, k, turns):
    """[B, T, H, D]"""
    q_, k_ = numbers(q), numbers(k)
    q_out = torch.view_as_real(q_ * turns[:, :, None, :]).flatten(3)
    k_out = torch.view_as_real(k_ * turns[:, :, None, :]).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def by_views(q, k, turns):
    made = []
    for x in (q, k):
        pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], x.shape[-1] // 2, 2))
        made.append(torch.view_as_real(turns.unsqueeze(2) * pairs).reshape(x.shape).to(x.dtype))
    return tuple(made)


def unflattened(q, k, turns):
    return tuple(
        torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turns[:, :, None])
        .flatten(-2)
        .type_as(x)
        for x in (q, k)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spelling", [llama4, by_views, unflattened])
def test_matches(spelling, dtype):
    check(
        spelling,
        random(2, 5, 4, 8, dtype=dtype),
        random(2, 5, 2, 8, dtype=dtype),
        angles(1, 5, 4),
        expect={"rope": 2},
        tol=1e-6 if dtype == torch.float32 else 1e-2,
    )


def test_heads_before_the_length():
    """DeepSeek-V2."""

    def fn(x, turns):
        return torch.view_as_real(numbers(x) * turns.unsqueeze(1)).flatten(3).type_as(x)

    check(fn, random(2, 4, 5, 8), angles(2, 5, 4), expect={"rope": 1}, tol=1e-6)


def test_double_precision():
    def fn(x, turns):
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)

    check(fn, random(2, 5, 8, dtype=torch.float64), angles(5, 4, dtype=torch.float64), expect={"rope": 1}, tol=1e-14)
    check(fn, random(2, 5, 8), angles(5, 4, dtype=torch.float64), expect={"rope": 1}, tol=1e-6)
    check(
        lambda x, turns: fn(x.float(), turns),
        random(2, 5, 8, dtype=torch.float64),
        angles(5, 4),
        expect={"rope": 1},
        tol=1e-6,
    )  # of x as it was rounded


def test_scaled_tables_made_in_the_region():
    def fn(x, f):
        turns = torch.polar(torch.ones_like(f), f) * 1.5
        return torch.view_as_real(numbers(x) * turns).flatten(-2)

    check(fn, random(2, 5, 8), torch.rand(5, 4), expect={"rope": 1}, tol=1e-6)


def test_dynamic_shapes():
    heads = Heads(lambda q, k, turns, _: llama4(q.transpose(1, 2), k.transpose(1, 2), turns))
    check(
        heads,
        random(2, 5, 6),
        angles(2, 5, 4),
        torch.zeros(1),
        expect={"rope": 2},
        dynamic=True,
        parameters=list(heads.parameters()),
    )


def turned(x, turns):
    return torch.view_as_real(numbers(x) * turns)


OTHERS = {
    "not joined": (lambda x, t: turned(x, t).sin(), None),
    "joined with the wrong dim": (lambda x, t: turned(x, t).flatten(1, 2), "the parts are not joined again"),
    "also read as pairs": (lambda x, t: (lambda y: y.flatten(-2) + y.sum())(turned(x, t)), "uses an inner value too"),
    "the product is read": (
        lambda x, t: (lambda y: torch.view_as_real(y).flatten(-2) * y.real.sum())(numbers(x) * t),
        "uses an inner value too",
    ),
    "real factors": (lambda x, t: turned(x, t.real).flatten(-2), "no plain complex tensor"),
    "conjugated": (lambda x, t: turned(x, t.conj()).flatten(-2), "no plain complex tensor"),
    "one turn for all": (lambda x, t: turned(x, t[..., :1]).flatten(-2), "not one turn for each pair"),
    "a constant": (lambda x, t: turned(x, 0.6 + 0.8j).flatten(-2), "no plain complex tensor"),
    "larger": (lambda x, t: turned(x, t.expand(3, 2, 5, 4)).flatten(-2), "not one turn for each pair"),
    "halves": (
        lambda x, t: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()) * t
        ).flatten(-2),
        "expected",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_does_not_match(name):
    fn, reason = OTHERS[name]
    seen = check(fn, random(2, 5, 8), angles(5, 4), expect={})
    assert len(seen.refused) == 1 and (reason or "") in seen.refused[0], seen.refused


def test_trained_turns():
    def fn(x, f):
        return torch.view_as_real(numbers(x) * torch.polar(torch.ones_like(f), f)).flatten(-2)

    check(fn, random(2, 5, 8), random(5, 4), expect={})


def test_two_numbers_in_one_product():
    """Either may be what is turned: the one that needs a gradient is."""

    def fn(x, y):
        return torch.view_as_real(numbers(x) * numbers(y)).flatten(-2)

    check(fn, random(5, 8), random(5, 8, grad=False), expect={"rope": 1}, tol=1e-6)
    check(fn, random(5, 8, grad=False), random(5, 8), expect={"rope": 1}, tol=1e-6)
    check(fn, random(5, 8), random(5, 8), expect={})
