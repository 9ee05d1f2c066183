"""Attention that is written out, in every spelling by itself: it is found, or left; and always computes the same.

All sizes are equal, so that dimensions taken for others would still fit.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes.run import family
from tests.support.passes.traced import recognized, traced
from tunecompile.compiler.attention_calls import attention_calls
from tunecompile.compiler.attention_calls.reading import Reading
from tunecompile.compiler.attention_calls.written_out import _without_cap, read_written_out

PASSES = family("document_attention", "attention")
N, LEAST = 4, torch.finfo(torch.float32).min


def is_found(fn, *shape) -> bool:
    """Whether a function of q, k, v, numbers to add and places to fill is attention. Its results stay as they are."""
    torch.manual_seed(0)
    q, k, v, bias = (torch.randn(shape or (N,) * 4, dtype=torch.float64) for _ in range(4))
    places = torch.ones(N, N, dtype=torch.bool).triu(1)
    graph, _ = recognized(fn, q, k, v, bias, places, passes=PASSES, tol=1e-7)
    return "softmax" not in str(graph)


def scores_times_values(change):
    """Attention whose scores are changed."""
    return lambda q, k, v, bias, places: change(q @ k.mT, bias, places).softmax(-1) @ v


FOUND = {
    "scores": lambda s, bias, places: s,
    "a factor": lambda s, bias, places: s * 0.3,
    "a factor in front": lambda s, bias, places: 0.3 * s,
    "a divisor": lambda s, bias, places: s / 2.5,
    "a negative factor": lambda s, bias, places: s * -0.3,
    "two factors": lambda s, bias, places: s * 0.3 / 2,
    "a factor, then numbers": lambda s, bias, places: s * 0.3 + bias,
    "numbers, then a factor": lambda s, bias, places: (s + bias) * 0.3,
    "numbers between factors": lambda s, bias, places: (s * 0.3 + bias) / 2 + bias[:1],
    "numbers of a row": lambda s, bias, places: s + bias[:1, :1, :, :1],
    "numbers of three dimensions": lambda s, bias, places: s + bias[0],
    "numbers of two dimensions": lambda s, bias, places: s + bias[0, 0],
    "filled": lambda s, bias, places: s.masked_fill(places, LEAST),
    "filled with infinity": lambda s, bias, places: s.masked_fill(places, float("-inf")),
    "filled with the least of fp16": lambda s, bias, places: s.masked_fill(places, -65504.0),
    "filled, then a factor": lambda s, bias, places: s.masked_fill(places, LEAST) * 0.3,
    "a factor, then filled": lambda s, bias, places: (s * 0.3).masked_fill(places, LEAST),
    "filled, then numbers": lambda s, bias, places: s.masked_fill(places, LEAST) + bias,
    "numbers, then filled": lambda s, bias, places: (s + bias).masked_fill(places, LEAST),
    "filled twice": lambda s, bias, places: s.masked_fill(places, LEAST).masked_fill(bias > 2, LEAST),
    "kept": lambda s, bias, places: torch.where(~places, s, LEAST),
    "kept, then a factor": lambda s, bias, places: torch.where(~places, s + bias, LEAST) * 0.5,
    "kept, then numbers": lambda s, bias, places: torch.where(~places, s, LEAST) + bias,
    "kept of a sum": lambda s, bias, places: torch.where(~places, s * 0.3 + bias, float("-inf")),
    "less the maximum": lambda s, bias, places: s - s.max(-1, keepdim=True)[0],
    "less the maximum, by place": lambda s, bias, places: s - s.max(dim=3, keepdim=True)[0],
    "less the maximum, all by place": lambda s, bias, places: s - s.max(-1, True)[0],
    "less the extreme, all by place": lambda s, bias, places: s - s.amax(-1, True),
    "less the extreme": lambda s, bias, places: s - s.amax(dim=-1, keepdim=True),
    "cast": lambda s, bias, places: (s + bias).float().double(),
}
LEFT = {
    "squared": lambda s, bias, places: s**2,
    "a truth value": lambda s, bias, places: s * True + bias.sum() * 0,
    "a factor that is a tensor": lambda s, bias, places: s * bias,
    "a factor of nothing": lambda s, bias, places: s.masked_fill(places, LEAST) * 0.0,
    "a factor that turns": lambda s, bias, places: s.masked_fill(places, LEAST) * -1e-30,
    "a number to divide": lambda s, bias, places: 2.5 / s,
    "a difference": lambda s, bias, places: s - bias,
    "filled with a little": lambda s, bias, places: s.masked_fill(places, -5.0),
    "filled with too little": lambda s, bias, places: s.masked_fill(places, -65503.0),
    "filled with much": lambda s, bias, places: s.masked_fill(places, 5.0),
    "filled, then divided": lambda s, bias, places: s.masked_fill(places, -7e4) / 1e4,
    "kept with a little": lambda s, bias, places: torch.where(~places, s, -5.0),
    "put elsewhere": lambda s, bias, places: torch.where(places, LEAST, s),
    "kept beside numbers": lambda s, bias, places: torch.where(~places, s, bias),
    "less its least": lambda s, bias, places: s - s.min(-1, keepdim=True)[0] + 0 * bias.sum(),
    "less the maximum of queries": lambda s, bias, places: s - s.max(-2, keepdim=True)[0],
    "less the maximum of heads": lambda s, bias, places: s - s.amax(1, keepdim=True),
    "less where the maximum stands": lambda s, bias, places: s - s.max(-1, keepdim=True)[1],
    "less the maximum of others": lambda s, bias, places: s - bias.max(-1, keepdim=True)[0],
    "less a maximum that is turned": lambda s, bias, places: s - s.amax(-1),
    "less a maximum that is turned, by place": lambda s, bias, places: s - s.max(-1)[0],
    "less the maximum of all": lambda s, bias, places: s - s.max(),
    "the maximum less": lambda s, bias, places: s.amax(-1, keepdim=True) - s,
    "whole numbers": lambda s, bias, places: s.to(torch.int32).double(),
    "more rows": lambda s, bias, places: s[:1] + bias,
    "of five dimensions": lambda s, bias, places: (s + bias[None])[0],
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_done_to_scores(name):
    assert is_found(scores_times_values(FOUND[name]))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_more_than_that(name):
    assert not is_found(scores_times_values(LEFT[name]))


KEYS = {
    "mT": (lambda k: k.mT, True),
    "transposed": (lambda k: k.transpose(-1, -2), True),
    "transposed by names": (lambda k: k.transpose(dim0=2, dim1=3), True),
    "permuted": (lambda k: k.permute(0, 1, 3, 2), True),
    "permuted by a list": (lambda k: k.permute([0, 1, -1, -2]), True),
    "heads are rows": (lambda k: k.permute(1, 0, 3, 2), True),
    "tokens are heads": (lambda k: k.permute(0, 2, 3, 1), True),
    "as they are": (lambda k: k + 0, False),
    "tokens for heads": (lambda k: k.transpose(1, 2), False),
    "width for heads": (lambda k: k.transpose(1, 3), False),
    "twice": (lambda k: k.transpose(2, 2), False),
    "turned": (lambda k: k.flip(-1), False),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_that_are_turned(name):
    turn, found = KEYS[name]
    made = is_found(lambda q, k, v, bias, places: (q @ turn(k) + bias).softmax(-1) @ v)
    assert made == found or (made and name in ("as they are", "tokens for heads", "width for heads"))


WEIGHTS = {
    "last by number": (lambda s: s.softmax(3), True),
    "a function": (lambda s: F.softmax(s, dim=-1), True),
    "in another dtype": (lambda s: F.softmax(s, -1, dtype=torch.float32).double(), True),
    "dropout of nothing": (lambda s: F.dropout(s.softmax(-1), 0.0), True),
    "dropout by name": (lambda s: F.dropout(s.softmax(-1), p=0.0, training=True), True),
    "no dropout in evaluation": (lambda s: F.dropout(s.softmax(-1), 0.5, False), True),
    "joined and parted": (lambda s: s.flatten(0, 1).softmax(-1).view(N, N, N, N), True),
    "over queries": (lambda s: s.softmax(2), False),
    "over heads": (lambda s: s.softmax(1), False),
    "of the transposed": (lambda s: s.mT.softmax(-1), False),
    "all dropped": (lambda s: F.dropout(s.softmax(-1), 1.0), False),
    "logarithms": (lambda s: s.log_softmax(-1), False),
    "times two": (lambda s: s.softmax(-1) * 2, False),
    "whole numbers": (lambda s: (s * 9).softmax(-1).to(torch.int32).double(), False),
    "the last column is left out": (lambda s: torch.cat([s, s[..., :1]], -1).softmax(-1)[..., :-1], False),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_how_weights_are_made(name):
    make, found = WEIGHTS[name]
    assert is_found(lambda q, k, v, bias, places: make(q @ k.mT * 0.3) @ v) == found


def turns(letters: str) -> list[str]:
    return ["".join(each) for each in itertools.permutations(letters)]


def test_products_by_letters():
    """In any order of their dimensions; the operands of each may be exchanged."""
    draw, found = torch.Generator().manual_seed(0), 0

    def one(of):
        return of[int(torch.randint(len(of), (), generator=draw))]

    for number in range(8):
        queries, keys = one(turns("bhqd")), one(turns("bhkd"))
        made, values = one(turns("bhqk") if number % 2 else ["bhqk", "hbqk"]), one(turns("bhkd"))
        result, exchanged = one(turns("bhqd")), number > 5

        def fn(q, k, v, bias, places):
            scores = torch.einsum(f"{keys},{queries}->{made}", k, q) if exchanged else None
            scores = torch.einsum(f"{queries}, {keys} -> {made}", q, k) if scores is None else scores
            return torch.einsum(f"{made},{values}->{result}", [(scores * 0.3).softmax(-1), v])

        found += is_found(fn)
    assert found >= 2


PRODUCTS = {
    "of queries and values": lambda q, k, v: torch.einsum("bhqk,bhqd->bhkd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v),
    "summed over heads": lambda q, k, v: torch.einsum("bhqd,bhkd->bqk", q, k).softmax(-1)[:, None] @ v,
    "a letter twice": lambda q, k, v: torch.einsum("bhqd,bhdd->bhq", q, k)[..., None].softmax(-1) @ v[:, :, :1],
    "of three": lambda q, k, v: torch.einsum("bhqd,bhkd,bhkd->bhqk", q, k, k).softmax(-1) @ v,
    "of three, scores among them": lambda q, k, v: torch.einsum("bhqd,bhkd,bhqk->bhqk", q, k, (q @ k.mT).exp()).softmax(-1) @ v,
    "width stays": lambda q, k, v: torch.einsum("bhqd,bhkd->bhqd", q, k).softmax(-1) @ v,
    "scores are read elsewhere": lambda q, k, v: (lambda s: s.softmax(-1) @ v + s.sum())(torch.einsum("bhqd,bhkd->bhqk", q, k)),
    "values of other heads": lambda q, k, v: torch.einsum("bhqk,gbkd->bhqd", (q @ k.mT).softmax(-1), v),
    "no result is named": lambda q, k, v: torch.einsum("abcd,abed", q, k).softmax(-1) @ v,
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_other_products_by_letters(name):
    assert not is_found(lambda q, k, v, bias, places: PRODUCTS[name](q, k, v))


THREE = {
    "bmm": (lambda q, k, v, bias: torch.bmm(torch.bmm(q, k.mT).softmax(-1), v), True),
    "last by number": (lambda q, k, v, bias: (q @ k.transpose(1, 2)).softmax(2) @ v, True),
    "one head": (lambda q, k, v, bias: (q @ k.mT + bias).softmax(-1) @ v, True),
    "added first": (lambda q, k, v, bias: torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=0.3).softmax(-1) @ v, True),
    "added by names": (
        lambda q, k, v, bias: bias.baddbmm(batch1=q, batch2=k.mT, alpha=2.0).mul(0.3).softmax(-1) @ v,
        True,
    ),
    "nothing added": (lambda q, k, v, bias: torch.baddbmm(bias, q, k.mT, beta=0).softmax(-1) @ v, True),
    "heads apart for a mask": (
        lambda q, k, v, bias: ((q @ k.mT).view(2, 2, N, N) + bias[:2].view(2, 1, N, N)).view(N, N, N).softmax(-1) @ v,
        True,
    ),
    "keys as they are": (lambda q, k, v, bias: torch.baddbmm(bias, q, k).softmax(-1) @ v, False),
    "of pairs of rows": (lambda q, k, v, bias: (q @ k.mT + bias[:, None]).softmax(-1) @ v, False),
    "over queries": (lambda q, k, v, bias: torch.bmm(q, k.mT).softmax(1) @ v, False),
    "rows for tokens": (lambda q, k, v, bias: (q @ k.transpose(0, 1)).softmax(-1) @ v, False),
}


@pytest.mark.parametrize("name", THREE)
def test_attention_of_three_dimensions(name):
    fn, found = THREE[name]
    assert is_found(lambda q, k, v, bias, places: fn(q, k, v, bias), N, N, N) == found


def read(fn, *inputs):
    """(What is read of the function's result, the graph's inputs.)"""
    graph = traced(fn, *inputs).graph
    (node,) = graph.output_node().all_input_nodes
    return read_written_out(node), list(graph.find_nodes(op="placeholder"))


def beside(join=lambda s, column: torch.cat([s, column], -1), column=None, kept=lambda w: w[..., :-1], change=None):
    """Attention whose scores have a column of numbers by head beside them."""

    def fn(q, k, v, sinks):
        made = (column or (lambda each: each.reshape(1, -1, 1, 1).expand(2, -1, N, -1)))(sinks)
        scores = join(q @ k.mT * 0.5, made)
        return kept((change or (lambda s: s))(scores).softmax(-1)) @ v

    return fn


SINKS = {
    "as gpt-oss has them": (beside(), True),
    "by number": (beside(join=lambda s, column: torch.cat([s, column], dim=3)), True),
    "all dimensions are named": (beside(kept=lambda w: w[:, :, :, :-1]), True),
    "less the maximum": (beside(change=lambda s: s - s.max(dim=-1, keepdim=True).values), True),
    "less the extreme": (beside(change=lambda s: s - s.amax(-1, keepdim=True)), True),
    "viewed": (beside(column=lambda each: each.view(1, 3, 1, 1).expand(2, 3, N, 1)), True),
    "ahead of the scores": (beside(join=lambda s, column: torch.cat([column, s], -1)), False),
    "the first column is left out": (beside(kept=lambda w: w[..., 1:]), False),
    "two columns": (beside(column=lambda each: each.reshape(1, -1, 1, 1).expand(2, -1, N, 2), kept=lambda w: w[..., :-2]), False),
    "and one more": (beside(join=lambda s, column: torch.cat([s, s[..., :1], column], -1), kept=lambda w: w[..., :-1][..., :N]), False),
    "more rows": (beside(join=lambda s, column: torch.cat([s, s], 2), kept=lambda w: w[:, :, :N]), False),
    "of another row": (lambda q, k, v, sinks: torch.cat([q @ k.mT * 0.5, sinks.view(1, 3, 1, 1).expand(2, 3, 1, N)], -2).softmax(-1)[..., :-1] @ v[:, :, 1:], False),
    "by token": (beside(column=lambda each: each[:1].reshape(1, 1, 1, 1).expand(2, 3, N, 1)), False),
    "turned": (beside(column=lambda each: each.reshape(1, 1, 3, 1).expand(2, 3, 3, 1)[:, :, :1].expand(2, 3, N, 1)), False),
    "a column of two numbers": (beside(column=lambda each: (each * each).reshape(1, -1, 1, 1).expand(2, -1, N, -1)), "mul"),
}  # fmt: skip


@pytest.mark.parametrize("name", SINKS)
def test_sinks(name):
    """Of two rows, three heads and four tokens."""
    fn, expected = SINKS[name]
    found, inputs = read(fn, *(torch.randn(2, 3, N, 5) for _ in range(3)), torch.randn(3))
    assert (found is not None) == bool(expected)
    if found is not None:
        assert found.arguments.sinks is inputs[3] or found.arguments.sinks.name == expected
        assert found.arguments.scale == 0.5 and not found.returned


def test_sinks_of_operands_in_another_order():
    """Whose heads stand where queries are as many: whoever reads sinks takes the second dimension for heads."""

    def fn(q, k, v, sinks):
        column = sinks.view(1, 3, 1, 1).expand(2, 3, 3, 1)
        scores = torch.cat([torch.einsum("bqhd,bkhd->bhqk", q, k), column], -1)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v)

    assert read(fn, *torch.randn(3, 2, 3, 3, 5), torch.randn(3))[0] is None


def test_how_operands_stand():
    """Keys that are turned as they must be have no order of their own, so that the mask is all there is to it."""
    four, three = [torch.randn(2, 3, N, 5) for _ in range(3)], [torch.randn(2, N, 5) for _ in range(3)]
    found, inputs = read(lambda q, k, v, m: (q @ k.permute(0, 1, 3, 2) + m).softmax(-1) @ v, *four, torch.ones(N, N))
    assert found.arguments.mask is inputs[3] and found.orders == (None,) * 4 and found.heads == 0
    found, inputs = read(lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, *three, torch.ones(N, N))
    assert found.heads == 1 and found.arguments.mask is None and [term.mask for term in found.terms] == inputs[3:]
    found, _ = read(
        lambda q, k, v: (q @ k.mT).view(2, 3, N, N).softmax(-1).view(6, N, N) @ v,
        *(each.flatten(0, 1) for each in four),
    )
    assert found.heads == 3


ONE_TERM = {
    "added": (lambda s, m: s + m, True),
    "filled": (lambda s, m: s.masked_fill(m > 0, LEAST), False),
    "with a factor": (lambda s, m: (s + m) * 0.5, False),
    "with heads apart": (lambda s, m: (s.view(2, 3, N, N) + m).view(6, N, N), False),
}


@pytest.mark.parametrize("name", ONE_TERM)
def test_a_mask_that_is_all_that_is_done_to_scores(name):
    """It alone may tell of documents. One that is filled in says the contrary, and others stand otherwise."""
    change, alone = ONE_TERM[name]
    shape = (6, N, 5) if name == "with heads apart" else (2, 3, N, 5)
    found, _ = read(lambda q, k, v, m: change(q @ k.mT, m).softmax(-1) @ v, *torch.randn(3, *shape), torch.ones(N, N))
    assert len(found.terms) == 1 and (found.arguments.mask is not None) == alone


@pytest.mark.parametrize("divisor, scale", [(4, 0.25), (1, 1.0), (0, None), (0.0, None)])
def test_scores_that_are_divided(divisor, scale):
    found, _ = read(lambda q, k, v: (q @ k.mT / divisor).softmax(-1) @ v, *torch.randn(3, 2, 3, N, 5))
    assert (found and found.arguments.scale) == scale


def test_a_mask_of_operands_in_another_order():
    def fn(q, k, v, m):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + m
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

    found, _ = read(fn, *torch.randn(3, 2, N, 3, 5), torch.ones(N, N))
    assert any(found.orders) and len(found.terms) == 1 and found.arguments.mask is None


def test_what_is_read_of_it():
    """Terms first to last, with the factors that come after them, and everything between operands and result."""

    def fn(q, k, v, bias, places):
        scores = (q @ k.mT * 0.5 + bias).masked_fill(places, LEAST) * 0.25
        return torch.where(~places, scores, LEAST).softmax(-1) @ v

    places, four = torch.zeros(N, N, dtype=torch.bool), [torch.randn(N, N, N, N) for _ in range(4)]
    graph = traced(fn, *four, places).graph
    inputs = dict(zip("qkvbp", graph.find_nodes(op="placeholder")))
    (node,) = graph.output_node().all_input_nodes
    found = read_written_out(node)
    call, (first, second, third) = found.arguments, found.terms
    assert (call.query, call.key, call.value) == (inputs["q"], inputs["k"], inputs["v"])
    assert (call.scale, call.mask, call.sinks, call.softcap, call.dropout, call.causal) == (
        0.125,
        None,
        None,
        0,
        0,
        False,
    )
    assert (first.mask, first.fill, first.factor, first.keeps, first.joined) == (inputs["b"], None, 0.25, False, False)
    assert (second.mask, second.fill, second.factor, second.keeps) == (inputs["p"], LEAST, 0.25, False)
    assert (third.fill, third.factor, third.keeps) == (LEAST, 1.0, True) and found.heads == 0
    assert len(found.inside) == 8 and node not in found.inside and not found.returned
    assert not attention_calls(graph)


CAPS = {
    "a soft-cap": (lambda s: torch.tanh(s / 5.0) * 5.0, 5.0),
    "by methods": (lambda s: s.div(5.0).tanh().mul(5.0), 5.0),
    "another function": (lambda s: torch.sigmoid(s / 5.0) * 5.0, 0.0),
    "two numbers": (lambda s: torch.tanh(s / 5.0) * 4.0, 0.0),
    "multiplied": (lambda s: torch.tanh(s * 5.0) * 5.0, 0.0),
    "rounded down": (lambda s: torch.tanh(torch.div(s, 5.0, rounding_mode="floor")) * 5.0, 0.0),
    "turned": (lambda s: torch.tanh(s / -5.0) * -5.0, 0.0),
    "by scores": (lambda s: torch.tanh(s / 5.0) * s, 0.0),
}


@pytest.mark.parametrize("name", CAPS)
def test_soft_caps(name):
    """What only looks like one has no scores before it, and nothing of it is read."""
    fn, cap = CAPS[name]
    graph, read = traced(fn, torch.randn(N, N)).graph, Reading()
    (made,), (given,) = graph.output_node().all_input_nodes, graph.find_nodes(op="placeholder")
    assert _without_cap(made, read) == ((given, cap) if cap else (made, 0.0)) and len(read.inside) == (3 if cap else 0)
