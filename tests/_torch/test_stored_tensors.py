"""Tensors that a traced function stores, beside what it returns."""

import pytest
import torch

from tunecompile._torch.stored_tensors import stores_tensors

KEPT: list = []


class Keeps(torch.nn.Module):
    """A layer that does something with its result, or its input."""

    def __init__(self, what):
        super().__init__()
        self.what, self.count, self.values, self.entries, self.pairs = what, 0, [torch.zeros(1)], {}, ()

        kept = None

        def close_over(value):
            nonlocal kept
            kept = value
            return kept

        self.close_over = close_over

    def forward(self, x, given):
        y = x.sin()
        self.what(self, x, y, given)
        return y


def in_closure(layer, x, y, given):
    layer.close_over(y)


def in_attribute(layer, x, y, given):
    layer.kept = y.sigmoid()


def in_list(layer, x, y, given):
    layer.values.append(y)


def in_pair(layer, x, y, given):
    layer.values.append((3, {"value": y}))


def in_tuple(layer, x, y, given):
    layer.pairs = (*layer.pairs, y)


def in_dictionary(layer, x, y, given):
    layer.entries["y"] = [y]


def its_input(layer, x, y, given):
    layer.values.append(x)


def in_class(layer, x, y, given):
    type(layer).kept = y


def in_global(layer, x, y, given):
    KEPT.append(y)


def in_argument(layer, x, y, given):
    given["y"] = y


STORE = [in_closure, in_attribute, in_list, in_pair, in_tuple, in_dictionary, its_input, in_class, in_global]
STORE += [in_argument]


def counts(layer, x, y, given):
    layer.count += 1
    layer.entries["count"] = layer.count


def makes_its_own(layer, x, y, given):
    values, entries = [y], {}
    entries["y"] = values
    values.append(x)


def found(what, allowed=lambda given: ()):
    answers, given = [], {}

    def backend(gm, inputs):
        answers.append(stores_tensors(allowed(given)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda layer, *args: layer(*args), backend=backend, fullgraph=True)(Keeps(what), torch.ones(2), given)
    return answers


@pytest.mark.parametrize("what", STORE, ids=lambda each: each.__name__)
def test_what_is_stored_anywhere(what):
    assert found(what) == [True]


@pytest.mark.parametrize("what", [counts, makes_its_own])
def test_numbers_and_containers_of_the_calls_own(what):
    assert found(what) == [False]


def test_containers_that_it_may_write_to():
    assert found(in_argument, lambda given: {id(given)}) == [False]
    assert found(in_list, lambda given: {id(given)}) == [True]
