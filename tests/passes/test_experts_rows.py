"""Which reads of rows by an order, and by its inverse, become ops, and what each is; of small functions without Dynamo."""

from operator import setitem

import pytest
import torch
from torch.fx import Graph

from tests.support.passes.run import family
from tests.support.passes.traced import recognized
from tunecompile.passes.recognize.experts.ids import source

PASSES = family("expert_rows")
TOKENS, CHOICES, WIDTH = 6, 2, 4
ROWS = TOKENS * CHOICES

torch.fx.wrap("setitem")  # a call of the graph


def seen(fn, expect, *more):
    """The context of a function of rows [6, 4], of rows [12, 4] and of twelve ids; results and gradients are its own."""
    torch.manual_seed(0)
    x, rows = (torch.randn(n, WIDTH, dtype=torch.float64, requires_grad=True) for n in (TOKENS, ROWS))
    return recognized(fn, x, rows, torch.randint(4, (ROWS,)), *more, passes=PASSES, expect=expect)[1]


def inverse(order, numbers=lambda order: torch.arange(order.size(0)), like=torch.empty_like):
    places = like(order)
    setitem(places, order, numbers(order))
    return places


def there_and_back(order_of=lambda ids: torch.sort(ids)[1], places_of=inverse, total=lambda parts: parts.sum(1)):
    """A copy of each token for each of its choices, and their sum."""

    def fn(x, rows, ids):
        order = order_of(ids)
        there = x[order // CHOICES] * 2
        return total(there[places_of(order)].view(TOKENS, CHOICES, WIDTH))

    return fn


BOTH = {"spread_rows": 1, "collect_rows": 1, "inverse_order": 1}
APART = {"spread_rows": 2, "inverse_order": 1}
ONE = {"spread_rows": 1, "inverse_order": 1}
FOUND = {
    "a sort": (there_and_back(), BOTH),
    "an order alone": (there_and_back(torch.argsort), BOTH),
    "by methods": (there_and_back(lambda ids: ids.argsort(), lambda order: order.argsort()), BOTH),
    "the inverse by a sort": (there_and_back(places_of=torch.argsort), BOTH),
    "the inverse by names": (there_and_back(places_of=lambda o: o.argsort(dim=0, descending=False, stable=True)), BOTH),
    "an order from the greatest": (there_and_back(lambda ids: torch.sort(ids, descending=True)[1]), BOTH),
    "zeros that are filled": (there_and_back(places_of=lambda order: inverse(order, like=torch.zeros_like)), BOTH),
    "by a function": (there_and_back(total=lambda parts: torch.sum(parts, dim=1)), BOTH),
    "a list of dimensions": (there_and_back(total=lambda parts: parts.sum([1], False)), BOTH),
    "a tuple of dimensions": (there_and_back(total=lambda parts: parts.sum((1,))), BOTH),
    "a tuple of width": (there_and_back(total=lambda parts: parts.sum((2,))), APART),
    "a list of width": (there_and_back(total=lambda parts: parts.sum([2])), APART),
    "a sum that keeps its dimension": (there_and_back(total=lambda parts: parts.sum(1, keepdim=True)), APART),
    "a sum of width": (there_and_back(total=lambda parts: parts.sum(2)), APART),
    "a sum of all": (there_and_back(total=lambda parts: parts.sum()), APART),
    "a sum of both": (there_and_back(total=lambda parts: parts.sum([1, 2])), APART),
    "a mean": (there_and_back(total=lambda parts: parts.mean(1)), APART),
    "parts that are read twice": (there_and_back(total=lambda parts: parts.sum(1) + parts[:, 0]), APART),
    "an order that is made twice": (lambda x, rows, ids: rows[ids.argsort()][inverse(ids.argsort())], ONE),
    "rows in order and back": (lambda x, rows, ids: (lambda o: rows[o].sin()[inverse(o)])(ids.argsort()), APART),
    "without a sum": (lambda x, rows, ids: (lambda o: x[o // 2][o.argsort()].exp())(ids.argsort()), APART),
    "one way": (lambda x, rows, ids: x[ids.argsort() // CHOICES], ONE),
    "one way, by a function": (
        lambda x, rows, ids: x[torch.floor_divide(ids.argsort(), CHOICES)],
        ONE,
    ),
    "back alone": (
        lambda x, rows, ids: rows[inverse(ids.argsort())].reshape(TOKENS, CHOICES, WIDTH).sum(1),
        {"collect_rows": 1, "inverse_order": 1},
    ),
    "parts of another shape": (
        lambda x, rows, ids: rows[inverse(ids.argsort())].view(TOKENS, WIDTH, CHOICES).sum(1),
        ONE,
    ),
    "rows that are read beside their sum": (
        lambda x, rows, ids: (lambda r: r.view(TOKENS, 2, WIDTH).sum(1) + r[:TOKENS])(rows[inverse(ids.argsort())]),
        ONE,
    ),
}
LEFT = {
    "the inverse from the greatest": lambda x, rows, ids: rows[ids.argsort().argsort(descending=True)],
    "the inverse from the greatest, by place": lambda x, rows, ids: rows[torch.argsort(ids.argsort(), 0, True)],
    "sorted for another purpose": lambda x, rows, ids: rows[torch.sort(ids)[1]],
    "values, not places": lambda x, rows, ids: x[torch.sort(ids)[0] // CHOICES],
    "no order": lambda x, rows, ids: x[ids // CHOICES],
    "other numbers": lambda x, rows, ids: rows[
        inverse(ids.argsort(), lambda order: torch.arange(order.size(0)).roll(1))
    ],
    "numbers of a step": lambda x, rows, ids: rows[
        inverse(ids.argsort(), lambda order: torch.arange(0, order.size(0)))
    ],
    "numbers that are computed": lambda x, rows, ids: rows[inverse(ids.argsort(), lambda order: order * 1)],
    "one number": lambda x, rows, ids: rows[inverse(ids.argsort(), lambda order: 3)],
    "one number in a tensor": lambda x, rows, ids: rows[
        inverse(ids.argsort(), lambda order: torch.arange(order.dim()))
    ],
    "another's tensor is filled": lambda x, rows, ids: rows[
        inverse(ids.argsort(), like=lambda order: torch.zeros_like(ids))
    ],
    "no blank tensor is filled": lambda x, rows, ids: rows[inverse(ids.argsort(), like=torch.ones_like)],
    "by what is left over": lambda x, rows, ids: x[ids.argsort() % TOKENS],
    "by its negative": lambda x, rows, ids: x[ids.argsort() // -CHOICES],
    "a number is divided": lambda x, rows, ids: x[TOKENS // (ids.argsort() + 3)],
    "too many a token": lambda x, rows, ids: x[ids.argsort() // 3],
    "some of them": lambda x, rows, ids: x[(ids.argsort() // CHOICES)[:5]],
    "rows of whole numbers": lambda x, rows, ids: ids[ids.argsort() // CHOICES] * x[0, 0],
    "columns": lambda x, rows, ids: x.T[:, ids.argsort() // CHOICES],
    "orders of rows of a matrix": lambda x, rows, ids: x[ids.view(2, TOKENS).argsort() // CHOICES],
}


@pytest.mark.parametrize("name", FOUND)
def test_rows_by_an_order_and_its_inverse(name):
    fn, ops = FOUND[name]
    context = seen(fn, ops)
    reads = sum(count for op, count in ops.items() if op != "inverse_order")
    assert [(tally.found, tally.rewritten, tally.refused) for tally in context.tallies] == [(reads, reads, [])]


@pytest.mark.parametrize("name", LEFT)
def test_other_reads(name):
    context = seen(LEFT[name], {})
    refused = ["rows are left out, or read twice"] * (name == "too many a token")
    assert [reason.partition(": ")[2] for tally in context.tallies for reason in tally.refused] == refused


@pytest.mark.parametrize("given", [3, [1, 2], ()])
def test_a_call_of_no_tensor_has_no_source(given):
    graph = Graph()
    node = graph.call_function(torch.cumsum, given if given == () else (given, 0))
    assert source(node, torch.cumsum) is None and source(given, torch.cumsum) is None
    x = graph.placeholder("x")
    assert source(graph.call_function(torch.cumsum, (x, 0)), torch.cumsum, "cumsum") is x
    assert source(graph.call_function(torch.cumprod, (x, 0)), torch.cumsum) is None and source(x, "x") is None


def test_what_is_changed_is_no_order():
    """Neither the order itself nor its inverse, after it was filled."""

    def order(x, rows, ids):
        order = ids.argsort()
        made = x[order // CHOICES]
        order.add_(0)
        return made

    def places(x, rows, ids):
        places = inverse(ids.argsort())
        places.sub_(places.min())
        return rows[places]

    seen(order, {})
    seen(places, {})


def test_rows_that_change_before_their_sum():
    """They were read before that; so only the sum stays apart."""

    def fn(x, rows, ids):
        rows = rows.detach() * 1
        read = rows[inverse(ids.argsort())]
        rows.zero_()
        return read.view(TOKENS, CHOICES, WIDTH).sum(1) * x[0, 0]

    seen(fn, ONE)


def test_sums_in_another_dtype():
    """Rows are cast before they are collected, as the sum has them."""
    context = seen(there_and_back(total=lambda parts: parts.sum(1, dtype=torch.float32).double()), BOTH)
    assert not context.tallies[0].refused


@pytest.mark.parametrize("stays", [True, False])
def test_what_computed_the_inverse_goes_with_its_last_reader(stays):
    def fn(x, rows, ids):
        order = torch.sort(ids)[1]
        places = inverse(order)
        made = x[order // CHOICES][places].view(TOKENS, CHOICES, WIDTH).sum(1)
        return (made, places + 1) if stays else made

    given = torch.randn(TOKENS, WIDTH), torch.randn(ROWS, WIDTH), torch.randint(4, (ROWS,))
    graph, _ = recognized(fn, *given, passes=PASSES, expect=BOTH)
    assert [any(node.target is each for node in graph.nodes) for each in (torch.empty_like, torch.arange, setitem)] == (
        [stays] * 3
    )


def test_of_two_inverses_each_goes_with_its_own_readers():
    def fn(x, rows, ids):
        order = torch.sort(ids)[1]
        first, second = inverse(order), inverse(order)
        return rows[first].sin() * rows[second].cos(), first + 1

    given = torch.randn(TOKENS, WIDTH), torch.randn(ROWS, WIDTH), torch.randint(4, (ROWS,))
    graph, _ = recognized(fn, *given, passes=PASSES, expect=APART)
    assert [sum(node.target is each for node in graph.nodes) for each in (torch.empty_like, setitem)] == [1, 1]
