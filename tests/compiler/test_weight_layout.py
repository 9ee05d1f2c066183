"""Which products of adapted linears may read a matrix in place of their weights; seen on small graphs of fake tensors."""

import dataclasses

import pytest
import torch

from tunecompile._torch.fake_tensors import make_fx
from tunecompile.compiler.weight_layout import (
    give_matrices,
    growth,
    matrix_bytes,
    matrix_shape,
    movable,
    replaceable,
)
from tunecompile.ops.lora import lora_linear
from tunecompile.ops.nf4 import dequantize_4bit

TOKENS, WIDTH, ROWS, RANK = 4, 128, 70, 3
SHAPES = {"x": (TOKENS, WIDTH), "w": (ROWS, WIDTH), "a": (RANK, WIDTH), "b": (ROWS, RANK), "other": (ROWS, WIDTH)}


def linear(x, weights, a, b):
    return lora_linear(x, [], weights, [], a, b, [2.0] * len(a), torch.float32)[0]


def graph_of(fn, **other):
    """The graph of a function of x, w, a, b and another weight, whose inputs have these names."""
    inputs = {name: torch.randn(shape) for name, shape in SHAPES.items()} | other
    gm = make_fx(fn, tracing_mode="fake")(*inputs.values())
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), inputs):
        node._rename(name)
    return gm


def plain(x, w, a, b, other):
    return linear(x, [w], [a], [b])


def siblings(x, w, a, b, other):
    return linear(x, [w, other], [a, a.sin()], [b, b.sin()])


MOVABLE = {
    "one": plain,
    "returned, too": lambda x, w, a, b, other: (linear(x, [w], [a], [b]), w),
    "read twice by the same product": lambda x, w, a, b, other: (
        linear(x, [w], [a], [b]) + linear(x.sin(), [w], [a], [b])
    ),
}
STAYS = {
    "read elsewhere": lambda x, w, a, b, other: (linear(x, [w], [a], [b]), x @ w.T),
    "with other adapters": lambda x, w, a, b, other: linear(x, [w], [a], [b]) + linear(x, [w], [a + 1], [b]),
    "with adapters that are inputs of another product": lambda x, w, a, b, other: (
        linear(x, [w], [a], [b]) + linear(x, [w], [other[:3]], [b])
    ),
    "computed": lambda x, w, a, b, other: linear(x, [w * 2], [a], [b]),
    "of computed adapters": siblings,
    "whose sibling is read elsewhere": lambda x, w, a, b, other: (linear(x, [w, other], [a, a], [b, b]), other.sum()),
    "no product": lambda x, w, a, b, other: x @ w.T,
}


@pytest.mark.parametrize("name", MOVABLE)
def test_dense_weights_that_may_move(name):
    gm = graph_of(MOVABLE[name])
    found = movable(gm.graph)
    assert list(found) == ["w"] and found["w"].columns == WIDTH and not found["w"].quantized
    assert matrix_shape(found["w"]) == (128, WIDTH), "73 rows, in whole cache lines"
    assert growth(gm.graph) == (128 - ROWS) * WIDTH * 4
    assert not replaceable(gm.graph) and matrix_bytes(gm.graph) == 0


@pytest.mark.parametrize("name", STAYS)
def test_dense_weights_that_stay(name):
    graph = graph_of(STAYS[name]).graph
    assert not movable(graph) and growth(graph) == 0


def test_weights_of_another_layout_or_dtype_stay():
    assert not movable(graph_of(plain, w=torch.randn(WIDTH, ROWS).T).graph)
    half = {"x": torch.randn(TOKENS, WIDTH).bfloat16(), "w": torch.randn(ROWS, WIDTH).bfloat16()}
    assert growth(graph_of(plain, **half).graph) == (128 - ROWS) * WIDTH * 2


def test_calls_on_matrices():
    """The first weight's input becomes the matrix, and the other weights are read no more."""

    def both(x, w, a, b, other):
        return linear(x, [w, other], [a, a], [b, b])

    gm = graph_of(both)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    assert give_matrices(gm, [], inputs) == [] and give_matrices(gm, ["other"], inputs) == []
    (slots,) = give_matrices(gm, ["w"], inputs)
    assert dataclasses.astuple(slots) == (
        *(1, ((1,), (4,)), (2, 2), (3, 3), (2.0, 2.0), (192, WIDTH), WIDTH, torch.float32, True),
    )
    places = gm.graph.find_nodes(op="placeholder")
    assert places[1].meta["val"] is inputs[1] and tuple(inputs[1].shape) == (192, WIDTH) and not places[4].users
    assert tuple(inputs[4].shape) == (ROWS, WIDTH)
    (call,) = gm.graph.find_nodes(op="call_function", target=lora_linear.overload)
    assert call.args[2] == [places[1]]


PACKED = ROWS * WIDTH // 2


def quantized(view=lambda packed: packed, more=lambda packed, dense, absmax: packed):
    """An adapted linear of a 4-bit weight; `more` reads it, too."""

    def fn(x, packed, a, b, absmax):
        dense = dequantize_4bit(view(packed), absmax, None, None, None, ROWS, WIDTH, 64, "nf4", torch.float32)
        return linear(x, [dense], [a], [b]), more(packed, dense, absmax)

    return fn


def read_of(fn):
    """(The products that may be replaced, how the graph reads packed weights.)"""
    inputs = {"x": (TOKENS, WIDTH), "a": (RANK, WIDTH), "b": (ROWS, RANK), "absmax": (PACKED // 32,)}
    given = {name: torch.randn(shape) for name, shape in inputs.items()}
    given = {"x": given["x"], "packed": torch.zeros(PACKED, 1, dtype=torch.uint8), **given}
    gm = make_fx(fn, tracing_mode="fake")(*given.values())
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), given):
        node._rename(name)
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
    found, read, graph = read_of(quantized(view))
    assert (read.op == "placeholder") == direct == bool(found) and list(found) in ([], ["packed"])
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert not direct or len(calls) == 4, "views go that nothing reads: there are the weight, the product, its results"
    if direct:
        product = found["packed"]
        assert product.quantized and matrix_shape(product) == (128, 192)
        assert matrix_bytes(graph) == 128 * 192 * 4 and not movable(graph)


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
    assert bool(read_of(quantized(more=more))[0]) == may
