"""Rotary embedding in the spellings of real models, and what is no rotation."""

from functools import partial

import pytest
import torch

from tests.support.passes import run
from tests.support.passes.rope import PASSES, H, Heads, rotate_half, tables, turned
from tests.support.passes.run import random
from tests.support.passes.traced import recognized
from tunecompile.passes.recognize.rope import _last_slice

check = partial(run.check, passes=PASSES)


def halves(dim=8, grad=False):
    angles = torch.rand(1, 1, 5, dim // 2) * 6
    return angles.cos().requires_grad_(grad), angles.sin().requires_grad_(grad)


def llama(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def swapped(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    return sin * rotate_half(q) + cos * q, torch.add(torch.mul(cos, k), torch.mul(rotate_half(k), sin))


def own_negation(q, k, cos, sin):
    def half(x):
        h = x.size(-1) // 2
        return torch.concat([torch.neg(x[..., h:]), x[..., :h]], -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


@pytest.mark.parametrize(
    "parts, told",
    [
        (lambda a, b, c, s: (a * c - b * s, a * s + b * c), 1),
        (lambda a, b, c, s: (c * a - s * b, c * b + s * a), 1),
        (lambda a, b, c, s: (a * c - b * s, a * c + b * s), 0),
        (lambda a, b, c, s: (a * c - b * s, a * s - b * c), 0),
        (lambda a, b, c, s: (a * c - b * s, a * s), 0),
        (lambda a, b, c, s: (a * c - b * c, a * c + b * c), 0),
        (lambda a, b, c, s: (a * c - b, a * s + b * c), 0),
    ],
)
def test_a_rotation_is_told_whatever_joins_its_parts(parts, told):
    _, context = recognized(
        lambda a, b, c, s: torch.where(a > 0, *parts(a, b, c, s)), *(random(2, 5, 4) for _ in range(4)), passes=PASSES
    )
    (tally,) = context.tallies
    assert tally.found == told == len(tally.refused)


def partial(q, k, cos, sin):
    """Phi-3, GPT-NeoX: only the first dims turn."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    dim = cos.shape[-1]
    made = []
    for x in (q, k):
        turn, rest = x[..., :dim], x[..., dim:]
        made.append(torch.cat([(turn * cos) + (rotate_half(turn) * sin), rest], dim=-1))
    return tuple(made)


def unbound(q, k, cos, sin):
    def half(x):
        first, second = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
        return torch.cat([-second, first], dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def cast_twice(q, k, cos, sin):
    """ModernBERT: each product has a cast of its own."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple((x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype) for x in (q, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", [llama, swapped, own_negation, unbound, cast_twice])
def test_matches(spelling, dtype):
    check(
        spelling,
        random(2, 4, 5, 8, dtype=dtype),
        random(2, 2, 5, 8, dtype=dtype),
        *tables(dtype=dtype),
        expect={"rope": 2},
        tol=1e-5 if dtype == torch.float32 else 1e-2,
    )


@pytest.mark.parametrize("rows", [1, 2])
def test_transposed_heads_and_positions_of_each_row(rows):
    def fn(q, k, cos, sin):
        return llama(q.view(2, 5, 4, 8).transpose(1, 2), k.view(2, 5, 2, 8).transpose(1, 2), cos, sin)

    check(fn, random(2, 5, 32), random(2, 5, 16), *tables(rows=rows), expect={"rope": 2})


def test_dynamic_shapes():
    """Batch and length are symbols; the head's width comes from a weight and is none."""
    heads = Heads(llama)
    check(
        heads, random(2, 5, 6), *tables(rows=2), expect={"rope": 2}, dynamic=True, parameters=list(heads.parameters())
    )


def test_partial():
    check(partial, random(2, 4, 5, 12), random(2, 2, 5, 12), *tables(), expect={"rope": 2})


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_tables_of_another_dtype(dtypes):
    check(
        llama,
        random(2, 4, 5, 8, dtype=dtypes[0]),
        random(2, 2, 5, 8, dtype=dtypes[0]),
        *tables(dtype=dtypes[1]),
        expect={"rope": 2},
        tol=1e-2,
    )


def test_casts_to_a_narrower_dtype():
    """Eager rounds each of the two gradients, so that one cast is not the same."""
    rows = [random(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2)]
    check(cast_twice, *rows, *tables(dtype=torch.float32), expect={}, tol=1e-5)


def apart(x, cos, sin):
    """GPT-OSS."""
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def apart_swapped(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([cos * first - sin * second, sin * first + cos * second], -1)


@pytest.mark.parametrize("spelling", [apart, apart_swapped])
def test_tables_of_half_the_width(spelling):
    check(spelling, random(2, 4, 5, 8), *halves(), expect={"rope": 1})
    check(spelling, random(2, 4, 5, 8, dtype=torch.bfloat16), *halves(), expect={"rope": 1}, tol=1e-2)


def in_slices(first, second):
    """What is split by slices, and turned by tables of half the width."""

    def fn(x, cos, sin):
        a, b = first(x), second(x)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return fn


SLICES = {
    "halves": (lambda x: x[..., :H], lambda x: x[..., H:]),
    "halves of sizes": (lambda x: x[..., : x.shape[-1] // 2], lambda x: x[..., x.shape[-1] // 2 :]),
    "halves from the end": (lambda x: x[:, :, :, 0:-H], lambda x: x[:, :, :, -H:]),
    "pairs": (lambda x: x[..., 0::2], lambda x: x[..., 1::2]),
    "full slices": (lambda x: x[:, :, :, ::2], lambda x: x[:, :, :, 1::2]),
}  # DeepSeek: pairs become halves


@pytest.mark.parametrize("name", SLICES)
def test_slices_and_tables_of_half_the_width(name):
    fn = in_slices(*SLICES[name])
    check(fn, random(2, 4, 5, 8), *halves(), expect={"rope": 1})
    check(fn, random(2, 4, 5, 8, dtype=torch.bfloat16), *halves(), expect={"rope": 1}, tol=1e-2)
    heads = Heads(lambda q, k, cos, sin: (fn(q, cos, sin), fn(k, cos, sin)))
    tables = [torch.randn(2, 1, 5, 4) for _ in range(2)]
    check(heads, random(2, 5, 6), *tables, expect={"rope": 2}, dynamic=True, parameters=list(heads.parameters()))


NO_SLICES = {
    "exchanged": (lambda x: x[..., H:], lambda x: x[..., :H]),
    "pairs exchanged": (lambda x: x[..., 1::2], lambda x: x[..., ::2]),
    "one twice": (lambda x: x[..., :H], lambda x: x[..., :H]),
    "overlapping": (lambda x: x[..., :H], lambda x: x[..., 2:6]),
    "a half and every second": (lambda x: x[..., :H], lambda x: x[..., 1::2]),
    "every second of a half": (lambda x: x[..., :H:2].repeat(1, 1, 1, 2), lambda x: x[..., H:]),
    "rows": (lambda x: x[..., :H, :H], lambda x: x[..., H:, H:]),
    "heads": (lambda x: x[:, :, ..., :H], lambda x: x[:, ::2, ..., H:].repeat(1, 2, 1, 1)),
    "of two tensors": (lambda x: x[..., :H], lambda x: torch.sin(x)[..., H:]),
}


@pytest.mark.parametrize("name", NO_SLICES)
def test_no_slices_of_halves(name):
    rows = 4 if name == "rows" else 8
    seen = check(in_slices(*NO_SLICES[name]), random(2, 4, 8, 8), torch.randn(rows, 4), torch.randn(rows, 4), expect={})
    assert len(seen.refused) == 1, seen.refused


def test_slices_and_tables_of_the_whole_width():
    x = random(2, 4, 5, 2)
    check(in_slices(lambda x: x[..., :1], lambda x: x[..., 1:]), x, torch.randn(5, 2), torch.randn(5, 2), expect={})


def test_trained_tables_of_half_the_width():
    check(apart, random(2, 4, 5, 8), *halves(grad=True))


def test_tables_of_two_shapes():
    check(apart, random(2, 4, 5, 8), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 1))


def test_trained_tables():
    """The op has no gradient for them."""
    check(lambda x, c, s: x * c + rotate_half(x) * s, random(2, 4, 5, 8), random(5, 8), random(5, 8), expect={})
    check(
        lambda x, c, s: x * c + rotate_half(x) * s,
        random(2, 4, 5, 8),
        random(5, 8, grad=False),
        random(5, 8),
        expect={},
    )

    def from_frequencies(x, f):
        angles = torch.arange(5.0)[:, None] * f
        angles = torch.cat((angles, angles), -1)
        return x * angles.cos() + rotate_half(x) * angles.sin()

    check(from_frequencies, random(2, 4, 5, 8), random(4), expect={})


def test_constant_tables():
    check(lambda x: x * 0.6 + rotate_half(x) * 0.8, random(2, 4, 5, 8))


MUTATIONS = {
    "sign of the other half": turned(lambda x: torch.cat((x[..., H:], -x[..., :H]), -1)),
    "no sign": turned(lambda x: torch.cat((x[..., H:], x[..., :H]), -1)),
    "both signs": turned(lambda x: torch.cat((-x[..., H:], -x[..., :H]), -1)),
    "halves in place": turned(lambda x: torch.cat((-x[..., :H], x[..., H:]), -1)),
    "another split": turned(lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1)),
    "overlapping": turned(lambda x: torch.cat((-x[..., H:], x[..., 2:6]), -1)),
    "even and odd": turned(lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), -1)),
    "along the length": turned(lambda x: torch.cat((-x[..., 4:, :], x[..., :4, :]), -2)),
    "difference": lambda x, c, s: x * c - rotate_half(x) * s,
    "sum for product": lambda x, c, s: x * c + rotate_half(x) + s,
    "of another tensor": lambda x, c, s: x * c + rotate_half(torch.sin(x)) * s,
    "halves of two tensors": lambda x, c, s: x * c + torch.cat((-x[..., H:], torch.sin(x)[..., :H]), -1) * s,
    "inner user": lambda x, c, s: (lambda r: x * c + r * s + r)(rotate_half(x)),
    "inner product": lambda x, c, s: (lambda p: p + rotate_half(x) * s + p)(x * c),
    "rotated cosine": lambda x, c, s: rotate_half(x) * c + x * s,
    "three parts": turned(lambda x: torch.cat((-x[..., H:], x[..., :2], x[..., 2:H]), -1)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_does_not_match(name):
    if name == "rotated cosine":  # a rotation all the same, with the tables exchanged
        check(MUTATIONS[name], random(2, 4, 8, 8), torch.randn(8, 8), torch.randn(8, 8), expect={"rope": 1})
    else:
        check(MUTATIONS[name], random(2, 4, 8, 8), torch.randn(8, 8), torch.randn(8, 8), expect={})


APART = {
    "plus first": lambda a, b, c, s: (a * c + b * s, b * c + a * s),
    "minus second": lambda a, b, c, s: (a * c - b * s, b * c - a * s),
    "halves exchanged": lambda a, b, c, s: (b * c - a * s, a * c + b * s),
    "tables exchanged": lambda a, b, c, s: (a * s - b * c, b * c + a * s),
    "three": lambda a, b, c, s: (a * c - b * s, b * c + a * s, a),
}


@pytest.mark.parametrize("name", APART)
def test_does_not_match_apart(name):
    def fn(x, c, s):
        a, b = torch.chunk(x, 2, -1)
        return torch.cat(APART[name](a, b, c, s), -1)

    check(fn, random(2, 4, 5, 8), torch.randn(5, 4), torch.randn(5, 4), expect={})


def test_chunks_of_another_number_or_dim():
    def four(x, c, s):
        a, b, *_ = torch.chunk(x, 4, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    def rows(x, c, s):
        a, b = torch.chunk(x, 2, 1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    check(four, random(2, 4, 5, 8), torch.randn(5, 2), torch.randn(5, 2), expect={})
    check(rows, random(2, 4, 5, 8), torch.randn(5, 8), torch.randn(5, 8), expect={})


def test_cosine_larger_than_x():
    check(
        lambda x, c, s: x * c + rotate_half(x) * s,
        random(1, 4, 5, 8),
        torch.randn(3, 1, 5, 8),
        torch.randn(3, 1, 5, 8),
        expect={},
    )
    check(
        lambda x, c, s: x * c + rotate_half(x) * s,
        random(1, 4, 5, 8),
        torch.randn(5, 8),
        torch.randn(3, 1, 5, 8),
        expect={},
    )


@pytest.mark.parametrize("shapes", [((8,), (5, 8)), ((5, 1), (5, 8)), ((1,), (1,)), ((), ())])
def test_tables_that_broadcast(shapes):
    check(
        lambda x, c, s: x * c + rotate_half(x) * s, random(2, 4, 5, 8), torch.randn(shapes[0]), torch.randn(shapes[1])
    )


def test_never_across_a_mutation():
    def fn(x, c, s):
        y = x * 1.0
        r = rotate_half(y)
        y.add_(1.0)
        return y * c + r * s

    def cast(x, c, s):
        wide, again = x.float(), x.float()
        r = rotate_half(again)
        wide.add_(1.0)
        return wide * c + r * s

    def table(x, c, s):
        c = c * 1.0
        p = x * c
        c.zero_()
        return p + rotate_half(x) * s + c

    check(fn, random(2, 4, 5, 8), torch.randn(5, 8), torch.randn(5, 8), expect={})
    check(cast, random(2, 4, 5, 8, dtype=torch.bfloat16), torch.randn(5, 8), torch.randn(5, 8), expect={})
    check(table, random(2, 4, 5, 8, grad=False), torch.randn(5, 8), torch.randn(5, 8), expect={})


def test_a_chunked_rotate_half_is_not_known_yet_but_right():
    def fn(x, c, s):
        a, b = x.chunk(2, dim=-1)
        return x * c + torch.cat((-b, a), -1) * s

    check(fn, random(2, 4, 5, 8), torch.randn(5, 8), torch.randn(5, 8))


def test_turned_twice():
    def fn(x, c, s):
        y = torch.sin(x * c + rotate_half(x) * s)
        return y * c + rotate_half(y) * s

    check(fn, random(2, 4, 5, 8), torch.randn(5, 8), torch.randn(5, 8), expect={"rope": 2})


def test_turned_twice_at_once():
    def fn(x, c, s):
        y = x * c + rotate_half(x) * s
        return y * c + rotate_half(y) * s

    check(fn, random(2, 4, 5, 8), torch.randn(5, 8), torch.randn(5, 8), expect={"rope": 2})


@pytest.mark.parametrize(
    "index, expected",
    [
        ((..., slice(1, None)), True),
        ((slice(None), slice(None), slice(1, None)), True),
        ((slice(None), ..., slice(1, None)), True),
        (slice(1, None), False),
        ((), False),
        ((slice(None), slice(1, None)), False),
        ((..., slice(2), slice(1, None)), False),
        ((slice(2), slice(None), slice(1, None)), False),
        ((..., 0, slice(1, None)), False),
        ((..., 0), False),
    ],
)
def test_indices_that_leave_out_numbers_of_the_last_dimension_alone(index, expected):
    assert _last_slice(index, 3) == (slice(1, None) if expected else None)
