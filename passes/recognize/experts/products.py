"""Products grouped by expert, of stacks of weights with or without adapters.

These are torch's, and transformers' own op for dtypes that torch's does not support.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.nodes import is_disturbed, is_mutation
from tunecompile.ir.op import OPS
from tunecompile.ir.rewrite import annotate, erase_dead, replace
from tunecompile.ops import adapted_stack, grouped_lora_linear
from tunecompile.passes.recognize.experts.ids import asked

__all__ = ["PASS"]

_PRODUCTS = {torch._grouped_mm, torch.ops.aten._grouped_mm.default, getattr(F, "grouped_mm", None)} - {None}
BATCHED = "each row has a copy of its expert's matrix (experts_implementation='grouped_mm' has none)"
_PARAMETERS = ("input", "weight", "offs", "bias", "out_dtype")
#: parameter names of torch and transformers -> ours
_ALIASES = {"self": "input", "mat_a": "input", "mat2": "weight", "mat_b": "weight"}
#: calls that allocate their result, though their names suggest a view
_FRESH = {
    *(operator.mul, operator.add, operator.sub, operator.truediv, operator.floordiv, operator.pow),
    *(torch.sort, "sort", torch.cumsum, "cumsum", torch.histc, "histc", torch.empty_like, torch.zeros_like),
}


def _is_product(node: Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target in _PRODUCTS or str(node.target).startswith("transformers.grouped_mm_fallback")


def _operands(node: Node) -> dict[str, Any]:
    named = {_ALIASES.get(name, name): item for name, item in node.kwargs.items()}
    return {**dict.fromkeys(_PARAMETERS), **dict(zip(_PARAMETERS, node.args)), **named}


def _turned(node: Node) -> Node | None:
    """The stack of which this node is the transpose of the last two dims."""
    if node.op not in ("call_function", "call_method"):
        return None
    rest = tuple(tuple(each) if isinstance(each, list) else each for each in node.args[1:])
    if node.kwargs or not isinstance(node.args[0], Node) or getattr(value(node.args[0]), "ndim", 0) != 3:
        return None
    dims = {each % 3 for each in rest if isinstance(each, int)}
    exchanges = node.target in ("transpose", torch.transpose) and dims == {1, 2}
    permutes = node.target in ("permute", torch.permute) and rest in ((0, 2, 1), ((0, 2, 1),))
    return node.args[0] if exchanges or permutes or (node.target is getattr and rest == ("mT",)) else None


def _origin(node: Node) -> Node:
    """The node of which this one may be a view: arithmetic and ops allocate their results."""
    while node.op in ("call_function", "call_method") and node.target not in OPS and node.target not in _FRESH:
        if _is_product(node) or not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return node


def _mutated(graph: Graph, operands: Iterable[Any]) -> bool:
    """Whether the graph mutates one of these, or something that shares memory with it."""
    watched = {_origin(operand) for operand in operands if isinstance(operand, Node)}
    return any(
        _origin(node.all_input_nodes[0]) in watched
        for node in graph.nodes
        if is_mutation(node) and node.all_input_nodes
    )


def _refusal(graph: Graph, operands: dict[str, Any]) -> str | None:
    x, weight, offsets = (value(operands[name]) for name in ("input", "weight", "offs"))
    if not all(isinstance(operands[name], Node) for name in ("input", "weight", "offs")):
        return "a group for each row, and no offsets"
    if x.dim() != 2 or weight.dim() != 3 or offsets.dim() != 1 or offsets.shape[0] != weight.shape[0]:
        return "it multiplies no rows by a stack of matrices"
    if operands["bias"] is not None or operands["out_dtype"] not in (None, x.dtype) or x.dtype != weight.dtype:
        return "it adds a bias, or casts"
    if any(hasattr(each, "placements") for each in (x, weight, offsets)):
        return "weights or rows are sharded"
    base, adapters, _ = _stack(operands["weight"])
    if adapters is not None and adapters[3] != (_written(operands["weight"]) is operands["weight"]):
        return "the adapters multiply the other way round"
    if adapters is not None and _mutated(graph, [_written(operands["weight"]), base, *adapters[0], *adapters[1]]):
        return "its weights are mutated"
    return None


def _written(weight: Node) -> Node:
    """The stack whose matrices, transposed or not, a product reads."""
    turned = _turned(weight)
    return weight if turned is None else turned


def _stack(weight: Node) -> tuple[Node, tuple | None, bool]:
    """(The frozen stack, (a, b, scales, transposed) of its adapters, whether its matrices are [K, N])."""
    written = _written(weight)
    if written.target is not adapted_stack.overload:
        return written, None, written is weight
    stack, a, b, scales, transposed = written.args
    assert isinstance(stack, Node)
    # A frozen stack may be held the other way round than the code reads it. The adapters' sides are those of the code.
    turned = _turned(stack)
    return (stack if turned is None else turned), (a, b, scales, transposed), (written is weight) == (turned is None)


def _copies_a_matrix_a_row(node: Node) -> bool:
    """Whether a batched product reads a stack by an index of rows: as many matrices as there are rows are copied."""
    if node.target not in (torch.bmm, "bmm", torch.matmul, operator.matmul):
        return False
    for side in (_written(side) for side in node.args[:2] if isinstance(side, Node)):
        if side.target is operator.getitem and isinstance(side.args[1], Node):
            stack, ids = (getattr(value(each), "ndim", None) for each in side.args)
            if (stack, ids) == (3, 1) and not value(side.args[1]).is_floating_point():
                return True
    return False


def _build(x, stack, offsets, a, b, scales, transposed):
    return grouped_lora_linear(x, stack, offsets, a, b, scales, transposed, None)[0]


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("experts")
    for node in list(graph.nodes):
        batched = _copies_a_matrix_a_row(node)
        if not batched and not _is_product(node):
            continue
        operands, adapters = _operands(node), None
        reason = BATCHED if batched else _refusal(graph, operands)
        if reason is None:
            stack, adapters, transposed = _stack(operands["weight"])
            a, b, scales, _ = adapters or ((), (), (), transposed)
            bound = {
                "x": operands["input"],
                "stack": stack,
                "offsets": operands["offs"],
                "a": list(a),
                "b": list(b),
                "scales": [float(scale) for scale in scales],
                "transposed": transposed,
            }
            reason = replace(graph, (node,), _build, bound)
        if tally.judge(reason, node, f"{'adapted' if adapters else 'plain'} experts"):
            weight = operands["weight"]
            erase_dead(graph, [node, weight, *weight.all_input_nodes] if weight.op != "placeholder" else [node])
        else:
            node.meta["missed"] = reason
    for node in list(graph.nodes):
        if node.target is grouped_lora_linear.overload:
            _weigh_first(graph, node)


def _weighted(y: Node) -> tuple[list[Node], Node] | None:
    """(The calls from a product's rows to their routing weights, the weights), if nothing else uses the rows."""
    chain = [y]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        fills = user.target in ("masked_fill", torch.masked_fill) and user.args[:1] == (chain[-1],)
        if fills and asked(user, "mask", "value")[1] == 0:
            chain.append(user)
            continue
        if user.target is operator.mul:
            others = [side for side in user.args if side is not chain[-1]]
            (weights,) = others if len(others) == 1 and isinstance(others[0], Node) else (None,)
            shape = getattr(value(weights), "shape", None)
            if weights is not None and shape is not None and tuple(shape) == (value(y).shape[0], 1):
                return [*chain, user], weights
        break
    return None


def _weigh_first(graph: Graph, product: Node) -> None:
    """Apply routing weights to a product's input instead of its result: w (x W^T) = (w x) W^T.

    So no result is saved for the weights' gradient. Calls in between only set rows to 0, which is still correct.
    """
    (y, *others), (x, *rest) = list(product.users), product.args
    if rest[-1] is not None:  # the bias is weighted, too
        return
    read = [x, *(item for each in rest for item in (each if isinstance(each, (list, tuple)) else [each]))]
    found = None if others or not isinstance(x, Node) or _mutated(graph, read) else _weighted(y)
    if found is None:
        return
    (_, *masks, last), weights = found
    if is_disturbed(product, last, whole_numbers=False):
        return

    def add(kind: Callable[..., Node], *call: Any) -> Node:
        made = kind(*call)
        annotate(made, last)
        return made

    with graph.inserting_before(last):
        scaled = add(graph.call_function, operator.mul, (x, weights))
        if dtype_of(scaled) != dtype_of(x):
            scaled = add(graph.call_method, "to", (scaled, dtype_of(x)))
        made = add(graph.call_function, product.target, (scaled, *rest))
        made = add(graph.call_function, operator.getitem, (made, 0))
        for mask in masks:
            made = add(graph.call_method, "masked_fill", (made, *asked(mask, "mask", "value")))
        if dtype_of(made) != dtype_of(last):
            made = add(graph.call_method, "to", (made, dtype_of(last)))
    last.replace_all_uses_with(made)
    erase_dead(graph, [last, *masks, y, product])


PASS = Pass("experts", "recognize", run)
