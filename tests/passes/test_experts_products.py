"""Which products by experts are an op, and where their rows are weighted; seen on graphs that nobody runs."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from tests.support.passes.run import family, recognize
from tests.support.passes.traced import traced
from tunecompile.compiler.pass_manager import Context
from tunecompile.ops import grouped_lora_linear, layer_norm
from tunecompile.passes.recognize.experts.products import _mutated, _origin, _refusal

PASSES = family("experts")
EXPERTS, ROWS, WIDTH, INNER = 4, 12, 16, 8
PLACES = {name: place for place, name in enumerate(grouped_lora_linear.parameters)}


def seen(fn, **other):
    """(The op's calls, the graph's inputs by name, why others are none.)"""
    shapes = {"x": (ROWS, WIDTH), "w": (EXPERTS, WIDTH, INNER), "t": (EXPERTS, INNER, WIDTH), "weights": (ROWS, 1)}
    given = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    given |= {"ends": torch.tensor([3, 3, 9, 12], dtype=torch.int32)} | other
    gm, context = traced(fn, *given.values()), Context("test")
    recognize(PASSES, gm, context, tidy=True)
    calls = gm.graph.find_nodes(op="call_function", target=grouped_lora_linear.overload)
    (tally,) = context.tallies
    assert tally.found == tally.rewritten + len(tally.refused) and tally.rewritten == len(tally.places)
    return calls, dict(zip(given, gm.graph.find_nodes(op="placeholder"))), "; ".join(tally.refused)


def product(x, stack, ends):
    return torch._grouped_mm(x, stack, offs=ends)


STACKS = {
    "as they are": (lambda x, w, t, weights, ends: product(x, w, ends), "w", True),
    "by names": (lambda x, w, t, weights, ends: torch._grouped_mm(input=x, mat2=w, offs=ends), "w", True),
    "by other names": (lambda x, w, t, weights, ends: F.grouped_mm(mat_a=x, mat_b=w, offs=ends), "w", True),
    "by position": (lambda x, w, t, weights, ends: torch._grouped_mm(x, w, ends), "w", True),
    "mT": (lambda x, w, t, weights, ends: product(x, t.mT, ends), "t", False),
    "transposed": (lambda x, w, t, weights, ends: product(x, t.transpose(-2, -1), ends), "t", False),
    "transposed by a function": (lambda x, w, t, weights, ends: product(x, torch.transpose(t, 2, 1), ends), "t", False),
    "permuted": (lambda x, w, t, weights, ends: product(x, t.permute(0, 2, 1), ends), "t", False),
    "permuted by a list": (lambda x, w, t, weights, ends: product(x, t.permute([0, 2, 1]), ends), "t", False),
    "in the same dtype": (
        lambda x, w, t, weights, ends: torch._grouped_mm(x, w, offs=ends, out_dtype=torch.bfloat16),
        "w",
        True,
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_how_stacks_stand(name):
    fn, stack, transposed = STACKS[name]
    (call,), inputs, why = seen(fn)
    assert not why and call.args == (inputs["x"], inputs[stack], inputs["ends"], [], [], [], transposed, None)
    assert call.args[PLACES["transposed"]] is transposed and len(call.graph.nodes) == 8, "the transpose goes"


@pytest.mark.parametrize(
    "turn, written",
    [
        (lambda w: w.mT.mT, "mT of what is turned"),
        (lambda w: w.transpose(0, 1).contiguous().transpose(0, 1), "another transpose"),
        (lambda w: w.permute(0, 1, 2), "no turn"),
    ],
)
def test_what_a_product_reads_otherwise(turn, written):
    """The node that it reads, which is no transpose of the last dimensions, or that of which it is one."""
    (call,), inputs, why = seen(lambda x, w, t, weights, ends: product(x, turn(w), ends))
    stack = call.args[PLACES["weight"]]
    assert not why and stack is not inputs["w"] and call.args[PLACES["transposed"]] is ("mT" not in written)


OTHERS = {
    "no offsets": (lambda x, w, t, weights, ends: torch._grouped_mm(x.view(4, 3, WIDTH), w), "no offsets"),
    "sums of groups": (lambda x, w, t, weights, ends: product(x.mT, x, ends), "no rows by a stack"),
    "a matrix a row": (lambda x, w, t, weights, ends: torch.bmm(t[ends], x[:4, :, None]), "a copy of its"),
    "a matrix a row, behind": (lambda x, w, t, weights, ends: x[:4, None] @ w[ends], "a copy of its"),
    "a matrix a row, turned": (lambda x, w, t, weights, ends: x[:4, None] @ t[ends].mT, "a copy of its"),
    "by a method": (lambda x, w, t, weights, ends: x[:4, None].matmul(w[ends]), None),
}
NONE = {
    "matrices of a slice": lambda x, w, t, weights, ends: x[:4, None] @ w[:4],
    "matrices by an index of two dimensions": lambda x, w, t, weights, ends: x[:4, None] @ w[ends[:, None]][:, 0],
    "rows by an index": lambda x, w, t, weights, ends: x[ends % 4] @ w[0],
    "another operation": lambda x, w, t, weights, ends: x[:4, :, None] * w[ends % 4],
}


@pytest.mark.parametrize("name", OTHERS)
def test_products_that_stay(name):
    fn, reason = OTHERS[name]
    calls, _, why = seen(fn, ends=torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    assert not calls and (reason is None or reason in why) and (reason is not None or not why)


@pytest.mark.parametrize(
    "dtype, out, bias, casts",
    [
        (torch.bfloat16, None, False, False),
        (torch.bfloat16, torch.bfloat16, False, False),
        (torch.bfloat16, torch.float32, False, True),
        (torch.float32, None, False, True),
        (torch.bfloat16, None, True, True),
    ],
)
def test_products_that_cast_or_add(dtype, out, bias, casts):
    """Each by itself is a reason: torch's own product refuses some of them, transformers' computes them."""
    graph = Graph()
    given = {"input": torch.empty(2, 3, dtype=dtype), "weight": torch.empty(4, 3, 5, dtype=torch.bfloat16)}
    given |= {"offs": torch.empty(4, dtype=torch.int32)} | ({"bias": torch.empty(4, 5)} if bias else {})
    operands = {"bias": None, "out_dtype": out} | {name: graph.placeholder(name) for name in given}
    for name, example in given.items():
        operands[name].meta["example_value"] = example
    assert _refusal(graph, operands) == ("it adds a bias, or casts" if casts else None)


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_product_by_experts(name):
    calls, _, why = seen(NONE[name], ends=torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    assert not calls and not why


FIRST = {
    "by a number a row": lambda x, w, t, weights, ends: product(x, w, ends) * weights,
    "in front": lambda x, w, t, weights, ends: weights * product(x, w, ends),
    "behind a mask": lambda x, w, t, weights, ends: product(x, w, ends).masked_fill(weights > 0, 0.0) * weights,
    "behind a mask by names": lambda x, w, t, weights, ends: (
        product(x, w, ends).masked_fill(mask=weights > 0, value=0) * weights
    ),
    "in fp32": lambda x, w, t, weights, ends: product(x, w, ends) * weights.float(),
}
BEHIND = {
    "by a number each": lambda x, w, t, weights, ends: product(x, w, ends) * weights.expand(-1, INNER),
    "by one number": lambda x, w, t, weights, ends: product(x, w, ends) * weights[:1],
    "by a number a column": lambda x, w, t, weights, ends: product(x, w, ends) * x[0, :INNER],
    "by a constant": lambda x, w, t, weights, ends: product(x, w, ends) * 2.0,
    "by itself": lambda x, w, t, weights, ends: (lambda y: y * y)(product(x, w, ends)),
    "divided": lambda x, w, t, weights, ends: product(x, w, ends) / weights,
    "behind a mask of ones": lambda x, w, t, weights, ends: product(x, w, ends).masked_fill(weights > 0, 1.0) * weights,
    "behind a sum": lambda x, w, t, weights, ends: (product(x, w, ends) + 1) * weights,
    "read elsewhere": lambda x, w, t, weights, ends: (lambda y: y * weights + y)(product(x, w, ends)),
    "read behind its mask": lambda x, w, t, weights, ends: (lambda y: y * weights + y)(
        product(x, w, ends).masked_fill(weights > 0, 0.0)
    ),
    "another tensor that changes in between": lambda x, w, t, weights, ends: (
        lambda y: (weights.exp().mul_(2), y * weights)[1]
    )(product(x, w, ends)),
    "rows that change": lambda x, w, t, weights, ends: (lambda y: (x.add_(1), y * weights)[1])(product(x, w, ends)),
    "a stack that changes": lambda x, w, t, weights, ends: (lambda y: (w[0].add_(1), y * weights)[1])(
        product(x, w, ends)
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_rows_are_weighted_before_their_product(name):
    """In the product's dtype; the result has that which it had, and its masks."""
    (call,), inputs, _ = seen(FIRST[name])
    rows = call.args[PLACES["x"]]
    cast = rows.target == "to"
    scaled = rows.args[0] if cast else rows
    assert scaled.target is operator.mul and scaled.args[0] is inputs["x"] and cast == ("fp32" in name)
    (made,) = call.users
    (last,) = call.graph.output_node().all_input_nodes
    expected = torch.float32 if cast else torch.bfloat16
    assert last.meta["example_value"].dtype == expected and tuple(last.meta["example_value"].shape) == (ROWS, INNER)
    if "mask" in name:
        assert last.target == "masked_fill" and last.args[0] is made and last.args[2] == 0
    else:
        assert last is made or (last.target == "to" and last.args[0] is made)


@pytest.mark.parametrize("name", BEHIND)
def test_rows_that_are_weighted_behind_their_product(name):
    (call,), inputs, _ = seen(BEHIND[name])
    assert call.args[PLACES["x"]] is inputs["x"]


@pytest.mark.parametrize(
    "make, of_x",
    [
        (lambda x: x, True),
        (lambda x: x[1:], True),
        (lambda x: x.view(-1), True),
        (lambda x: x.mT[0].reshape(4), True),
        (lambda x: x * 2, False),
        (lambda x: (x + 1)[0], False),
        (lambda x: torch.sort(x)[0], False),
        (lambda x: layer_norm(x, None, None, 1e-5, torch.float32).view(-1), False),
        (lambda x: torch._grouped_mm(x, x, offs=x)[0], False),
    ],
)
def test_what_shares_memory_with_what_is_changed(make, of_x):
    """Arithmetic, sorts and ops allocate their results."""
    graph = Graph()
    x = torch.fx.Proxy(graph.placeholder("x"), torch.fx.proxy.GraphAppendingTracer(graph))
    made = make(x).node
    assert (_origin(made) is x.node) == of_x
    assert not _mutated(graph, [made, None])
    graph.call_method("add_", (x.node, 1))
    assert _mutated(graph, [made, 3]) == of_x
    graph.call_method("add_", (graph.call_method("view", (made, -1)), 1))
    assert _mutated(graph, [made])
