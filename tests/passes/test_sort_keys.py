"""Which sorts of ids go by short keys: the order is the same."""

import pytest
import torch

from tests.support.passes.run import family
from tests.support.passes.traced import recognized

PASSES = family("sort_keys")


def sorts(fn, x):
    """The dtypes of what the graph sorts; its results are the function's own."""
    graph, _ = recognized(lambda x: (x.sin(), *fn(x)), x, passes=PASSES)
    found = [node for node in graph.nodes if node.target in (torch.sort, "sort", torch.argsort, "argsort")]
    return [node.args[0].meta["example_value"].dtype for node in found]


def both(found):
    """Values and order."""
    return found[0], found[1]


def scores(experts=7, tokens=40, ties=False):
    torch.manual_seed(0)
    return torch.randint(3, (tokens, experts)).double() if ties else torch.rand(tokens, experts, dtype=torch.float64)


def ids_of(x):
    return torch.topk(x, 2)[1].reshape(-1)


FOUND = {
    "values and order": lambda x: both(torch.sort(ids_of(x))),
    "the order alone": lambda x: [torch.sort(ids_of(x))[1]],
    "values alone": lambda x: [torch.sort(ids_of(x))[0]],
    "by names": lambda x: both(torch.sort(ids_of(x), dim=0, stable=True)),
    "by methods": lambda x: both(x.topk(2, dim=-1)[1].view(-1).sort()),
    "an argsort": lambda x: [torch.argsort(ids_of(x), stable=True)],
    "values written to": lambda x: (lambda found: (found[0].clamp_(max=3), found[1]))(torch.sort(ids_of(x))),
    "scores written to": lambda x: normed(torch.topk(x, 2)),
    "twice": lambda x: [torch.sort(ids_of(x))[0], ids_of(x).argsort(stable=True)],
}
LEFT = {
    "from the greatest": lambda x: both(torch.sort(ids_of(x), descending=True, stable=True)),
    "scores": lambda x: both(torch.sort(torch.topk(x, 2)[0].reshape(-1))),
    "other numbers": lambda x: both(torch.sort(ids_of(x) * 100_000)),
    "written to": lambda x: both(torch.sort(ids_of(x).mul_(100_000))),
    "written to by another name": lambda x: multiplied(torch.topk(x, 2)[1]),
    "written to by a function": lambda x: added_to(torch.topk(x, 2)[1]),
    "scores by name": lambda x: both(torch.sort(torch.topk(input=x, k=2)[1].reshape(-1))),
    "of two dimensions": lambda x: both(torch.sort(torch.topk(x, 2)[1])),
}


def normed(found):
    scores = found[0]
    scores /= scores.sum(-1, keepdim=True)
    return [scores, *both(torch.sort(found[1].reshape(-1)))]


def added_to(ids):
    torch.add(ids, 100_000, out=ids)
    return both(torch.sort(ids.reshape(-1)))


def multiplied(ids):
    ids.mul_(100_000)
    return both(torch.sort(ids.reshape(-1)))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("case", FOUND)
def test_choices_are_sorted_by_short_keys(case, ties):
    found = sorts(FOUND[case], scores(ties=ties))
    assert found and set(found) == {torch.int16}


@pytest.mark.parametrize("case", LEFT)
def test_other_sorts_stay(case):
    assert torch.int16 not in sorts(LEFT[case], scores())


@pytest.mark.parametrize("experts, dtype", [(2**15 - 2, torch.int16), (2**15 - 1, torch.int64), (40_000, torch.int64)])
def test_choices_of_many_stay(experts, dtype):
    """Ids beyond 16 bits would wrap, and come first."""
    assert sorts(FOUND["values and order"], scores(experts, tokens=2)) == [dtype]
