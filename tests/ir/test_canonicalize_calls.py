"""The spelling of single calls, argument by argument, and which of them are left as they are."""

import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node, map_arg

from tunecompile._torch.modules import linear
from tunecompile.ir.canonicalize import TABLE, canonicalize_graph, drop_clones, dtype_of, name_of, value

VALUES = {
    "x": torch.ones(4, 6),
    "y": torch.ones(4, 6, dtype=torch.float64),
    "half": torch.ones(4, 6, dtype=torch.float16),
    "row": torch.ones(6),
    "stack": torch.ones(2, 4, 6),
}


def graph_of(*calls):
    """A graph of calls, (target, args, kwargs) each, in which names stand for inputs and numbers @i for calls."""
    graph = Graph()
    known = {name: graph.placeholder(name) for name in VALUES}
    for name, node in known.items():
        node.meta["example_value"] = VALUES[name]

    def placed(given):
        if isinstance(given, (tuple, list)):
            return type(given)(map(placed, given))
        return known.get(given, given) if isinstance(given, str) else given

    for i, (target, args, kwargs) in enumerate(calls):
        call = graph.call_method if isinstance(target, str) else graph.call_function
        made = known[f"@{i}"] = call(target, placed(args), {name: placed(each) for name, each in kwargs.items()})
        made.meta["example_value"] = VALUES["x"]
    return graph, list(known.values())[-1]


def spelt(target, args, kwargs):
    """(target, args, kwargs) of a call's spelling, with names; None where it has none."""
    found = TABLE[target](graph_of((target, args, kwargs))[1])
    if found is None:
        return None
    op, target, args, kwargs = found
    assert op == ("call_method" if isinstance(target, str) else "call_function")
    return target, map_arg(args, lambda node: node.name), dict(kwargs)


POW, MUL = operator.pow, operator.mul


def _name(each: object) -> str:
    """Of a case: without addresses, which differ between processes."""
    return getattr(each, "__name__", re.sub(r" at 0x\w+", "", str(each)))


SPELT = [
    ("mul", ("x", 2), {}, (MUL, ("x", 2), {})),
    (torch.multiply, ("x", "y"), {}, (MUL, ("x", "y"), {})),
    (MUL, ("x", "x"), {}, (POW, ("x", 2), {})),
    (MUL, ("half", "half"), {}, (MUL, ("half", "half"), {})),
    (MUL, (3, 3), {}, (MUL, (3, 3), {})),
    (operator.add, ("x", "x"), {}, (operator.add, ("x", "x"), {})),
    ("add", ("x", "y"), {"alpha": 2}, None),
    ("sub", ("x", "y"), {}, (operator.sub, ("x", "y"), {})),
    ("add", ("x",), {}, None),
    (torch.div, ("x", 2), {"rounding_mode": "floor"}, None),
    ("true_divide", ("x", 2), {}, (operator.truediv, ("x", 2), {})),
    (POW, ("x", -0.5), {}, (torch.rsqrt, ("x",), {})),
    (POW, ("y", -0.5), {}, (torch.rsqrt, ("y",), {})),
    (POW, ("half", -0.5), {}, (POW, ("half", -0.5), {})),
    (POW, ("x", 0.5), {}, (POW, ("x", 0.5), {})),
    (POW, (2.0, -0.5), {}, (POW, (2.0, -0.5), {})),
    (torch.mul, ("x", -0.5), {}, (MUL, ("x", -0.5), {})),
    ("neg", ("x",), {}, (operator.neg, ("x",), {})),
    ("negative", ("x",), {}, (operator.neg, ("x",), {})),
    (F.tanh, ("x",), {}, (torch.tanh, ("x",), {})),
    (torch.rsqrt, ("x",), {"out": "y"}, None),
    ("sqrt", ("x", "y"), {}, None),
    ("square", ("x",), {}, (POW, ("x", 2), {})),
    ("mean", ("x",), {}, None),
    ("mean", ("x", -1), {}, ("mean", ("x", (-1,), False), {})),
    (torch.mean, ("x", [0, 1], True), {}, ("mean", ("x", (0, 1), True), {})),
    ("mean", ("x",), {"axis": 1, "keepdims": True}, ("mean", ("x", (1,), True), {})),
    ("mean", ("x", -1), {"dtype": torch.float64}, None),
    ("mean", ("x", -1), {"dim": -1}, None),
    ("to", ("x", torch.float64), {}, ("to", ("x", torch.float64), {})),
    ("type", ("x", torch.float64), {}, ("to", ("x", torch.float64), {})),
    ("to", ("x",), {"dtype": torch.float64}, ("to", ("x", torch.float64), {})),
    ("to", ("x", torch.float64, True), {}, None),
    ("to", ("x", torch.float32, False, True), {}, None),
    ("to", ("x", torch.float64), {"copy": True}, None),
    ("to", ("x", "cpu"), {}, None),
    ("to", ("x",), {"device": torch.float64}, None),
    ("float", ("x",), {}, ("to", ("x", torch.float32), {})),
    ("bfloat16", ("x",), {"memory_format": 1}, None),
    ("half", ("x", 1), {}, None),
    ("type_as", ("x", "y"), {}, ("to", ("x", torch.float64), {})),
    ("type_as", ("x",), {}, None),
    ("type_as", ("x", 3), {}, None),
    (torch.cat, (["x", "y"],), {}, (torch.cat, (("x", "y"), 0), {})),
    (torch.concat, (("x", "y"), -1), {}, (torch.cat, (("x", "y"), -1), {})),
    (torch.cat, (["x", "y"],), {"axis": 1}, (torch.cat, (("x", "y"), 1), {})),
    (torch.cat, (["x", "y"],), {"out": "x"}, None),
    (torch.stack, (["x", "y"], 1), {}, (torch.stack, (("x", "y"), 1), {})),
    (linear, ("x", "y"), {}, (linear, ("x", "y", None), {})),
    (linear, ("x",), {"bias": "row", "weight": "y"}, (linear, ("x", "y", "row"), {})),
    (linear, ("x",), {}, None),
    (linear, ("x", "y", "row", 1), {}, None),
    (F.silu, ("x",), {}, (F.silu, ("x",), {})),
    (F.silu, ("x", False), {}, (F.silu, ("x",), {})),
    (F.silu, ("x", True), {}, None),
    (F.relu, ("x",), {"inplace": True}, None),
    ("relu", ("x",), {}, (F.relu, ("x",), {})),
    (F.gelu, ("x",), {}, (F.gelu, ("x",), {})),
    (F.gelu, ("x",), {"approximate": "none"}, (F.gelu, ("x",), {})),
    (F.gelu, ("x",), {"approximate": "tanh"}, (F.gelu, ("x",), {"approximate": "tanh"})),
    (F.gelu, ("x", 1, 2), {}, None),
    (F.rms_norm, ("x", (6,), "row", 1e-3), {}, (F.rms_norm, ("x", (6,), "row", 1e-3), {})),
    (torch.rms_norm, ("x", (6,)), {"eps": 1e-3}, (F.rms_norm, ("x", (6,), None, 1e-3), {})),
    (F.rms_norm, ("half", (6,)), {}, (F.rms_norm, ("half", (6,), None, torch.finfo(torch.float32).eps), {})),
    (F.rms_norm, ("y", (6,)), {}, (F.rms_norm, ("y", (6,), None, torch.finfo(torch.float64).eps), {})),
    (F.rms_norm, ("x",), {}, None),
    (F.layer_norm, ("x", (6,), "row"), {"eps": 1e-3}, (F.layer_norm, ("x", (6,), "row", None, 1e-3), {})),
    (torch.layer_norm, ("x", (6,), None, "row", 1e-3, False), {}, (F.layer_norm, ("x", (6,), None, "row", 1e-3), {})),
    (F.layer_norm, ("x", (6,), None, None, 1e-3, True), {}, None),
    ("flatten", ("x",), {}, ("flatten", ("x", 0, -1), {})),
    (torch.flatten, ("x", 1), {}, ("flatten", ("x", 1, -1), {})),
    ("chunk", ("x", 2), {}, (torch.chunk, ("x", 2, 0), {})),
    (torch.chunk, ("x",), {"dim": 1, "chunks": 3}, (torch.chunk, ("x", 3, 1), {})),
    (torch.unsqueeze, ("x",), {"dim": 1}, ("unsqueeze", ("x", 1), {})),
    ("unsqueeze", ("x",), {}, None),
]


@pytest.mark.parametrize("target, args, kwargs, expected", SPELT, ids=_name)
def test_the_spelling_of_a_call(target, args, kwargs, expected):
    assert spelt(target, args, kwargs) == expected


TURNED = [
    (getattr, ("y", "T"), {}, True),
    ("t", ("y",), {}, True),
    (torch.t, ("y",), {}, True),
    ("transpose", ("y", 0, 1), {}, True),
    (torch.transpose, ("y", 1, 0), {}, True),
    ("permute", ("y", 1, 0), {}, True),
    ("permute", ("y", (1, 0)), {}, True),
    (getattr, ("y", "mT"), {}, False),
    ("transpose", ("y", 0, 0), {}, False),
    ("transpose", ("y", -1, -2), {}, False),
    ("permute", ("y", 0, 1), {}, False),
    ("transpose", ("y",), {"dim0": 0, "dim1": 1}, False),
    ("t", ("row",), {}, False),
    (getattr, ("stack", "T"), {}, False),
    ("sin", ("y",), {}, False),
]


@pytest.mark.parametrize("target, args, kwargs, turned", TURNED)
@pytest.mark.parametrize("product", [torch.matmul, operator.matmul, torch.mm, "matmul", "mm"])
def test_a_product_with_the_transpose_of_a_matrix_is_a_linear(product, target, args, kwargs, turned):
    graph, node = graph_of((target, args, kwargs), (product, ("x", "@0"), {}))
    before = len(graph.nodes)
    canonicalize_graph(graph)
    found = [node for node in graph.nodes if node.target is linear]
    assert len(found) == turned and len(graph.nodes) == before - turned
    assert not turned or map_arg(found[0].args, lambda each: each.name) == ("x", "y", None)


def test_what_is_no_product_with_a_transpose():
    """Nothing named, no mutation and no change of modes in between; and a transpose that others read stays."""
    turn, product = (getattr, ("y", "T"), {}), (torch.matmul, ("x", "@0"), {})
    for calls, found in (
        ([turn, (torch.matmul, ("x",), {"other": "@0"})], 0),
        ([turn, (torch.matmul, ("@0", "x"), {})], 0),
        ([turn, ("add_", ("x", 1), {}), (torch.matmul, ("x", "@0"), {})], 0),
        ([turn, (torch._C._set_grad_enabled, (False,), {}), product], 0),
        ([("add_", ("x", 1), {}), (getattr, ("y", "T"), {}), (torch.matmul, ("x", "@1"), {})], 1),
        ([turn, product, ("sin", ("@0",), {})], 1),
    ):
        graph, _ = graph_of(*calls)
        canonicalize_graph(graph)
        assert len([node for node in graph.nodes if node.target is linear]) == found
    assert any(node.target is getattr for node in graph.nodes)


def reshaped(source, before, after, *users):
    graph, node = graph_of((source, ("x",), {}), ("view", ("@0", 1), {}), *users)
    node = next(node for node in graph.nodes if node.target == "view")
    node.args[0].meta["example_value"], node.meta["example_value"] = before, after
    return node, TABLE["view"](node)


def test_reshapes_of_pairs():
    pairs, joined = torch.empty(5, 3, 2), torch.empty(5, 6)
    for source in (torch.stack, torch.view_as_real):
        node, found = reshaped(source, pairs, joined)
        assert found == ("call_method", "flatten", (node.args[0], -2, -1), {})
    node, found = reshaped(torch.stack, torch.empty(3, 2), torch.empty(6))
    assert found == ("call_method", "flatten", (node.args[0], -2, -1), {}), "of a vector, too"
    into = (torch.view_as_complex, ("@1",), {})
    node, found = reshaped(torch.sin, joined, pairs, into)
    assert found == ("call_method", "unflatten", (node.args[0], -1, (-1, 2)), {})
    wide, halves = torch.empty(2, 5, 6), torch.empty(2, 5, 3, 2)
    node, found = reshaped(torch.sin, wide, halves, into)
    assert found == ("call_method", "unflatten", (node.args[0], -1, (-1, 2)), {}), "of more dims, too"
    node, found = reshaped(torch.stack, halves, wide)
    assert found == ("call_method", "flatten", (node.args[0], -2, -1), {})
    for other in (
        reshaped(torch.sin, pairs, joined),
        reshaped(torch.stack, pairs, torch.empty(15, 2)),
        reshaped(torch.stack, torch.empty(6), torch.empty(6)),
        reshaped(torch.sin, joined, pairs),
        reshaped(torch.sin, joined, torch.empty(5, 2, 3), into),
        reshaped(torch.sin, torch.empty(3, 10), pairs, into),
        reshaped(torch.stack, 3, joined),
        reshaped(torch.stack, pairs, None),
    ):
        assert other[1] is None


@pytest.mark.parametrize(
    "calls, left",
    [
        ([("to", ("x", torch.float32), {})], 0),
        ([("float", ("x",), {})], 0),
        ([("to", ("x", torch.float64), {})], 1),
        ([("to", ("half", torch.float32), {})], 1),
        ([(F.dropout, ("x", 0.0), {})], 0),
        ([(F.dropout, ("x",), {"training": False})], 0),
        ([(F.dropout, ("x", 0.5, False, True), {})], 0),
        ([(F.dropout, ("x", 0.5), {})], 1),
        ([(F.dropout, (), {"input": "x", "p": 0})], 0),
        ([(F.dropout, (3, 0.0), {})], 1),
        ([("clone", ("x",), {}), (MUL, ("@0", 2), {})], 1),
        ([(torch.clone, ("x",), {}), (torch.rsqrt, ("@0",), {})], 1),
        ([("clone", ("x",), {}), ("view", ("@0", -1), {})], 2),
        ([("clone", ("x",), {}), (MUL, ("@0", 2), {}), ("view", ("@0", -1), {})], 3),
        ([("clone", ("x",), {"memory_format": 1}), (MUL, ("@0", 2), {})], 2),
        ([("clone", ("x",), {}), ("add_", ("x", 1), {}), (MUL, ("@0", 2), {})], 3),
        ([("add_", ("x", 1), {}), ("clone", ("x",), {}), (MUL, ("@1", 2), {})], 2),
        ([("clone", ("x",), {}), (MUL, ("@0", 2), {}), ("add_", ("x", 1), {}), (MUL, ("@0", 2), {})], 4),
    ],
)
def test_calls_that_change_nothing_are_removed(calls, left):
    graph, _ = graph_of(*calls)
    canonicalize_graph(graph)
    assert len([node for node in graph.nodes if node.op != "placeholder"]) == left
    drop_clones(graph)
    assert len([node for node in graph.nodes if node.op != "placeholder"]) == left


def test_values_and_names():
    _, node = graph_of(("sin", ("x",), {}))
    assert value(node) is VALUES["x"] and value(3) == 3 and value(Graph().placeholder("y")) is None
    assert dtype_of(node) is torch.float32 and dtype_of(3) is None and isinstance(node, Node)
    names = [name_of(each) for each in (MUL, "to", F.silu, torch.ops.aten.mul.Tensor, operator.truediv)]
    assert names == ["mul", "to", "silu", "aten.mul", "div"]
