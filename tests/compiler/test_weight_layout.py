"""Which products of adapted linears may read a matrix in place of their weights; seen on small graphs of fake tensors."""

import dataclasses

import pytest
import torch

from tunecompile._torch.fake_tensors import make_fx
from tunecompile.compiler.weight_layout import give_matrices, matrix_bytes, matrix_shape, replaceable
from tunecompile.ops.lora import lora_linear
from tunecompile.ops.nf4 import dequantize_4bit

TOKENS, WIDTH, ROWS, RANK = 4, 128, 70, 3
PACKED = ROWS * WIDTH // 2
SHAPES = {"x": (TOKENS, WIDTH), "packed": (PACKED, 1), "a": (RANK, WIDTH), "b": (ROWS, RANK), "absmax": (PACKED // 32,)}


def linear(x, weights, a, b):
    return lora_linear(x, [], weights, [], a, b, [2.0] * len(a), torch.float32, "dense")[0]


def decoded(packed, absmax):
    return dequantize_4bit(packed, absmax, None, None, None, ROWS, WIDTH, 64, "nf4", torch.float32)


def graph_of(fn):
    """The graph of a function of x, a 4-bit weight, a, b, absmax, and another weight, whose inputs have these names."""
    shapes = {**SHAPES, "other": SHAPES["packed"]}
    kinds = {"packed": torch.uint8, "other": torch.uint8}
    gm = make_fx(fn, tracing_mode="fake")(*(torch.ones(shapes[n], dtype=kinds.get(n)) for n in shapes))
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), shapes):
        node._rename(name)
    return gm


def one(x, packed, a, b, absmax, other):
    return linear(x, [decoded(packed, absmax)], [a], [b])


def both(x, packed, a, b, absmax, other):
    return linear(x, [decoded(packed, absmax), decoded(other, absmax)], [a, a], [b, b])


REPLACED = {
    "one": one,
    "siblings": both,
    "read twice by the same product": lambda x, *rest: one(x, *rest) + one(x.sin(), *rest),
    "whose sibling is read elsewhere": lambda *given: (both(*given), given[5].sum()),
}
STAYS = {
    "with other adapters": lambda x, w, a, b, *rest: one(x, w, a, b, *rest) + one(x, w, a + 1, b, *rest),
    "with computed adapters": lambda x, w, a, b, *rest: one(x, w, a.sin(), b, *rest),
    "computed": lambda x, w, a, b, absmax, other: linear(x, [decoded(w, absmax) * 2], [a], [b]),
    "dense": lambda x, w, a, b, absmax, other: linear(x, [x.view(-1, WIDTH)], [a], [b[:TOKENS]]),
    "no product": lambda x, w, a, b, absmax, other: x @ decoded(w, absmax).T,
}


@pytest.mark.parametrize("name", REPLACED)
def test_weights_that_a_matrix_may_replace(name):
    graph = graph_of(REPLACED[name]).graph
    found = replaceable(graph)
    assert list(found) == ["packed"] and found["packed"].columns == WIDTH and found["packed"].quantized
    count = len(found["packed"].weights)
    shape = ((128, 192), (192, 192))[count - 1]  # [W; A] in whole cache lines, and [W | B]
    assert matrix_shape(found["packed"]) == shape and matrix_bytes(graph) == shape[0] * shape[1] * 4


@pytest.mark.parametrize("name", STAYS)
def test_weights_that_stay(name):
    graph = graph_of(STAYS[name]).graph
    assert not replaceable(graph) and matrix_bytes(graph) == 0


def test_calls_on_matrices():
    """The first weight's input becomes the matrix, and the other weights are read no more."""
    gm = graph_of(both)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    assert give_matrices(gm, [], inputs) == [] and give_matrices(gm, ["other"], inputs) == []
    (slots,) = give_matrices(gm, ["packed"], inputs)
    rest = ((None,), (None,), (None,), (ROWS,), (WIDTH,), (64,), ("nf4",), (torch.float32,))
    assert dataclasses.astuple(slots) == (
        *(1, ((1, 4, *rest), (5, 4, *rest)), (2, 2), (3, 3), (2.0, 2.0), (192, 192), WIDTH, torch.float32),
    )
    places = gm.graph.find_nodes(op="placeholder")
    assert places[1].meta["val"] is inputs[1] and tuple(inputs[1].shape) == (192, 192) and not places[5].users
    assert tuple(inputs[5].shape) == (PACKED, 1)
    (call,) = gm.graph.find_nodes(op="call_function", target=lora_linear.overload)
    assert call.args[2] == [places[1]]


def read_of(view=lambda packed: packed, more=lambda packed, dense, absmax: packed):
    """(The products that may be replaced, how the graph reads packed weights, the graph.) `more` reads them, too."""

    def fn(x, packed, a, b, absmax, other):
        dense = decoded(view(packed), absmax)
        return linear(x, [dense], [a], [b]), more(packed, dense, absmax)

    gm = graph_of(fn)
    found = replaceable(gm.graph)
    gm.graph.lint()
    (call,) = gm.graph.find_nodes(op="call_function", target=dequantize_4bit.overload)
    return found, call.args[0], gm.graph


@pytest.mark.parametrize(
    "view, direct",
    [
        (lambda packed: packed, True),
        (lambda packed: packed.view(-1), True),
        (lambda packed: packed.view(1, -1).t(), True),
        (lambda packed: packed.t().t().view(-1, 1), True),
        (lambda packed: packed.view(2, -1).t(), False),
        (lambda packed: packed.flip(0), False),
    ],
)
def test_packed_weights_are_read_directly(view, direct):
    """Through no view of all their bytes in their order, which would be saved in their place."""
    found, read, graph = read_of(view)
    assert (read.op == "placeholder") == direct == bool(found) and list(found) in ([], ["packed"])
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert not direct or len(calls) == 4, "views go that nothing reads: there are the weight, the product, its results"


@pytest.mark.parametrize(
    "more, may",
    [
        (lambda packed, dense, absmax: packed, True),
        (lambda packed, dense, absmax: dense, True),
        (lambda packed, dense, absmax: absmax.sum(), True),
        (lambda packed, dense, absmax: packed.sum(), False),
        (lambda packed, dense, absmax: dense.sin(), False),
    ],
)
def test_packed_weights_with_other_readers(more, may):
    assert bool(read_of(more=more)[0]) == may
