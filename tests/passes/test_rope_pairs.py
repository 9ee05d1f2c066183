"""Rotary embedding of pairs that lie beside each other, in the spellings of real models, and what is no such rotation."""

from functools import partial

import pytest
import torch

from tests.support.passes import run
from tests.support.passes.rope import PASSES, H, Heads, rotate_half, tables, turned
from tests.support.passes.run import random

check = partial(run.check, passes=PASSES)


def repeated(length=5, dim=8, dtype=torch.float32, rows=1):
    """Each angle twice in succession."""
    angles = (torch.rand(rows, 1, length, dim // 2) * 6).repeat_interleave(2, -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


PAIRS = {
    "list": lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2),
    "tuple": lambda x: torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2),
    "full slices": lambda x: torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2),
    "both": lambda x: torch.stack((-x[:, ..., 1::2], x[..., :, ::2]), dim=-1).flatten(-2),
    "to the end": lambda x: torch.stack((-x[..., 1 : x.shape[-1] : 2], x[..., 0 : x.shape[-1] : 2]), -1).flatten(
        -2, -1
    ),
    "counted from the first": lambda x: torch.stack((torch.neg(x[..., 1::2]), x[..., ::2]), x.dim()).flatten(
        x.dim() - 1
    ),
    "function": lambda x: torch.flatten(torch.stack(tensors=(-x[..., 1::2], x[..., ::2]), dim=-1), start_dim=-2),
    "reshape": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape),
    "reshape by sizes": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(*x.shape[:-1], -1),
    "view": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).view(x.shape),
    "view_as": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).view_as(x),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    def fn(q, k, c, s):
        return q * c + PAIRS[name](q) * s, s * PAIRS[name](k) + c * k

    check(fn, random(2, 4, 5, 8), random(2, 2, 5, 8), *repeated(), expect={"rope": 2})


def in_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_pairs_in_other_dtypes(dtypes):
    check(
        turned(in_pairs), random(2, 4, 5, 8, dtype=dtypes[0]), *repeated(dtype=dtypes[1]), expect={"rope": 1}, tol=1e-2
    )


def cast_first(x, c, s):
    """Cohere."""
    wide = x.float()
    return (wide * c + in_pairs(wide) * s).to(x.dtype)


def cast_behind(x, c, s):
    """Ernie 4.5."""
    return ((x.float() * c) + (in_pairs(x).float() * s)).to(x.dtype)


def cast_partly(x, c, s):
    return x.float() * c + in_pairs(x) * s


@pytest.mark.parametrize("spelling", [cast_first, cast_behind])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_pairs_that_are_cast(spelling, dtypes):
    narrowed = spelling is cast_behind and dtypes[0] is torch.float64
    check(
        spelling,
        random(2, 4, 5, 8, dtype=dtypes[0]),
        *repeated(dtype=dtypes[1]),
        expect={} if narrowed else {"rope": 1},
        tol=1e-2,
    )


def test_pairs_of_which_one_side_is_cast():
    check(cast_partly, random(2, 4, 5, 8, dtype=torch.bfloat16), *repeated(), expect={}, tol=1e-2)


@pytest.mark.parametrize("rows", [1, 2])
def test_pairs_in_a_part_of_each_head(rows):
    """GLM: the tables' halves are the same, one of them is repeated."""

    def fn(q, k, cos, sin):
        cos, sin = (t.unsqueeze(1)[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
        dim, made = cos.shape[-1], []
        for x in (q, k):
            turn, rest = x[..., :dim], x[..., dim:]
            made.append(torch.cat([(turn * cos) + (in_pairs(turn) * sin), rest], dim=-1))
        return tuple(made)

    check(fn, random(2, 4, 5, 12), random(2, 2, 5, 12), *tables(rows=rows), expect={"rope": 2})


def test_pairs_before_heads_are_transposed():
    """GPT-J: [B, T, H, D]."""

    def fn(x, c, s):
        c, s = (torch.repeat_interleave(t[:, :, None, :], 2, 3) for t in (c, s))
        return (x * c) + (PAIRS["full slices"](x) * s)

    check(fn, random(2, 5, 4, 8), torch.randn(1, 5, 4), torch.randn(1, 5, 4), expect={"rope": 1})


def test_pairs_with_dynamic_shapes():
    turn = PAIRS["full slices"]
    heads = Heads(lambda q, k, cos, sin: (q * cos + turn(q) * sin, k * cos + turn(k) * sin))
    check(
        heads, random(2, 5, 6), *repeated(rows=2), expect={"rope": 2}, dynamic=True, parameters=list(heads.parameters())
    )


def apart(x, cos, sin, join=lambda a, b: torch.stack((a, b), -1).flatten(-2)):
    """As the paper writes it, and Meta: each pair by tables of half the width."""
    even, odd = x[..., ::2], x[..., 1::2]
    return join(even * cos - odd * sin, even * sin + odd * cos)


def halved(length=5, dim=8, rows=1):
    angles = torch.rand(rows, 1, length, dim // 2) * 6
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pairs_and_tables_of_half_the_width(dtype):
    def fn(q, k, c, s):
        return apart(q, c, s), apart(k, c, s, lambda a, b: torch.stack([a, b], dim=-1).reshape(k.shape))

    check(
        fn,
        random(2, 4, 5, 8, dtype=dtype),
        random(2, 2, 5, 8, dtype=dtype),
        *halved(),
        expect={"rope": 2},
        tol=1e-5 if dtype == torch.float32 else 1e-2,
    )


NOT_APART = {
    "first and second exchanged": lambda x, c, s: torch.stack(
        (x[..., 1::2] * c - x[..., ::2] * s, x[..., ::2] * c + x[..., 1::2] * s), -1
    ).flatten(-2),
    "halves": lambda x, c, s: torch.stack(
        (x[..., :H] * c - x[..., H:] * s, x[..., H:] * c + x[..., :H] * s), -1
    ).flatten(-2),
    "stacked halves": lambda x, c, s: apart(x, c, s, lambda a, b: torch.stack((a, b), -2).flatten(-2)),
    "other dims flattened": lambda x, c, s: apart(x, c, s, lambda a, b: torch.stack((a, b), -1).flatten(2, 3)),
    "tables exchanged": lambda x, c, s: torch.stack(
        (x[..., ::2] * s - x[..., 1::2] * c, x[..., 1::2] * c + x[..., ::2] * s), -1
    ).flatten(-2),
    "of two tensors": lambda x, c, s: (
        lambda y: torch.stack((x[..., ::2] * c - y[..., 1::2] * s, y[..., 1::2] * c + x[..., ::2] * s), -1).flatten(-2)
    )(x.sin()),
    "one number for all": lambda x, c, s: apart(x, c[..., :1], s[..., :1]),
    "larger": lambda x, c, s: apart(x, c.expand(3, 2, 4, 5, 4), s.expand(3, 2, 4, 5, 4)),
}


@pytest.mark.parametrize("name", NOT_APART)
def test_no_pairs_by_tables_of_half_the_width(name):
    seen = check(NOT_APART[name], random(2, 4, 5, 8), *halved(), expect={})
    assert len(seen.refused) == 1, seen.refused


NO_PAIRS = {
    "sign of the other": (turned(lambda x: torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2)), "expected"),
    "first negated": (
        turned(lambda x: torch.stack((-x[..., ::2], x[..., 1::2]), -1).flatten(-2)),
        "not split into every second",
    ),
    "both negated": (turned(lambda x: torch.stack((-x[..., 1::2], -x[..., ::2]), -1).flatten(-2)), "expected"),
    "one twice": (
        turned(lambda x: torch.stack((-x[..., 1::2], x[..., 1::2]), -1).flatten(-2)),
        "not split into every second",
    ),
    "halves": (turned(lambda x: torch.stack((-x[..., H:], x[..., :H]), -1).flatten(-2)), "not split into every second"),
    "every second row": (
        turned(lambda x: torch.stack((-x[..., 1::2, :], x[..., ::2, :]), -1).flatten(-2).reshape(x.shape)),
        None,
    ),
    "rows beside each other": (
        turned(lambda x: torch.stack((-x[..., 1::2, :], x[..., ::2, :]), -2).flatten(-3, -2)),
        "not split into every second",
    ),
    "heads beside each other": (
        turned(lambda x: torch.stack((-x[:, 1::2], x[:, ::2]), 2).flatten(1, 2)),
        "not split into every second",
    ),
    "stacked halves": (turned(lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -2).flatten(-2)), "not stacked"),
    "stacked along the length": (
        turned(lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -2).reshape(x.shape)),
        None,
    ),
    "other dims flattened": (
        turned(lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(2, 3).reshape(x.shape)),
        None,
    ),
    "difference": (lambda x, c, s: x * c - in_pairs(x) * s, "expected"),
    "of another tensor": (lambda x, c, s: x * c + in_pairs(torch.sin(x)) * s, "expected"),
    "of two tensors": (
        turned(lambda x: torch.stack((-x[..., 1::2], torch.sin(x)[..., ::2]), -1).flatten(-2)),
        "expected",
    ),
    "inner user": (lambda x, c, s: (lambda r: x * c + r * s + r)(in_pairs(x)), "uses an inner value too"),
}


@pytest.mark.parametrize("name", NO_PAIRS)
def test_no_pairs(name):
    fn, reason = NO_PAIRS[name]
    seen = check(fn, random(2, 4, 8, 8), torch.randn(8, 8), torch.randn(8, 8), expect={})
    assert len(seen.refused) == 1 and (reason or "") in seen.refused[0], seen.refused


def test_every_third():
    fn = turned(lambda x: torch.stack((-x[..., 1::3], x[..., ::3]), -1).flatten(-2))
    seen = check(
        fn, random(2, 4, 5, 2), torch.randn(5, 2), torch.randn(5, 2), expect={}
    )  # of two they are the same elements, which nobody writes so
    assert "not split into every second" in seen.refused[0]


def test_a_slice_of_an_odd_width():
    check(
        lambda x, c, s: x[..., :6] * c + in_pairs(x[..., :6]) * s, random(2, 4, 5, 7), *repeated(dim=6), expect={}
    )  # two slices: two tensors
    check(
        lambda x, c, s: (lambda y: y * c + in_pairs(y) * s)(x[..., :6]),
        random(2, 4, 5, 7),
        *repeated(dim=6),
        expect={"rope": 1},
    )


def test_trained_or_constant_or_larger_tables_of_pairs():
    x = random(1, 4, 5, 8)
    check(turned(in_pairs), x, random(5, 8), random(5, 8), expect={})
    check(turned(in_pairs), x, random(5, 8, grad=False), random(5, 8), expect={})
    check(lambda x: x * 0.6 + in_pairs(x) * 0.8, x, expect={})
    check(turned(in_pairs), x, torch.randn(3, 1, 5, 8), torch.randn(3, 1, 5, 8), expect={})
    check(turned(in_pairs), x, torch.randn(5, 8), torch.randn(5, 8).bfloat16(), expect={})


def test_pairs_never_across_a_mutation():
    def fn(x, c, s):
        y = x * 1.0
        r = in_pairs(y)
        y.add_(1.0)
        return y * c + r * s

    check(fn, random(2, 4, 5, 8), torch.randn(5, 8), torch.randn(5, 8), expect={})


def test_one_tensor_in_both_layouts():
    check(
        lambda x, c, s: (x * c + in_pairs(x) * s, x * c + rotate_half(x) * s),
        random(2, 4, 5, 8),
        torch.randn(5, 8),
        torch.randn(5, 8),
        expect={"rope": 2},
    )


def unbound(x):
    first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-second, first], dim=-1).flatten(3)


def written(x, c, s):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s, out = c[..., 0::2], s[..., 1::2], torch.empty_like(x)
    out[..., 0::2] = first * c - second * s
    out[..., 1::2] = first * s + second * c
    return out.type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "turn",
    [lambda x, c, s: (x.float() * c + unbound(x).float() * s).to(x.dtype), written],
    ids=["unbound", "written"],
)
def test_pairs_of_unbind_and_of_writes(turn, dtype):
    tol = 1e-5 if dtype == torch.float32 else 2e-2
    check(turn, random(2, 4, 5, 8, dtype=dtype), *repeated(), expect={"rope": 1}, tol=tol)


def read_between(x, c, s):
    out = torch.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * c[..., 0::2] - x[..., 1::2] * s[..., 0::2]
    seen = out[..., 0::2].clone()
    out[..., 1::2] = x[..., 0::2] * s[..., 0::2] + x[..., 1::2] * c[..., 0::2]
    return out + torch.cat((seen, seen), -1)


def swapped_places(x, c, s):
    out = torch.empty_like(x)
    out[..., 1::2] = x[..., 0::2] * c[..., 0::2] - x[..., 1::2] * s[..., 0::2]
    out[..., 0::2] = x[..., 0::2] * s[..., 0::2] + x[..., 1::2] * c[..., 0::2]
    return out


@pytest.mark.parametrize(
    "turn, found", [(read_between, {}), (swapped_places, {})], ids=["read between", "swapped places"]
)
def test_other_writes_stay(turn, found):
    check(turn, random(2, 4, 5, 8), *repeated(), expect=found)
