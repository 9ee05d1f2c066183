"""Products that read tokens where they stand, in place of copies of them on their way to experts.

A spread of rows, and the gradient of their sum, is a gather: a copy of as many rows as all experts have together. A
template that reads rows through the order does without. The sums themselves get a kernel of their own: what code
generation makes of sums of a few rows each takes four times as long as memory does.
"""

import operator

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import Op
from tunecompile.ir.views import CASTS, cast_of
from tunecompile.ops import (
    collect_rows,
    gathered_lora_linear,
    gathered_lora_linear_backward,
    grouped_lora_linear,
    spread_rows,
    sum_rows,
)

__all__ = ["PASS"]


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes):
        if node.target is grouped_lora_linear.overload:
            _read_in_place(graph, node)
        elif node.target is grouped_lora_linear.backward_op.overload:
            _read_in_place_backward(graph, node)
        elif node.target is collect_rows.overload:
            y, _, places, choices = node.args
            _sum(graph, node, y, places, choices)
        elif node.target is spread_rows.backward_op.overload:
            grad, _, places, choices = node.args
            for user in list(node.users):
                _sum(graph, user, grad, places, choices)
    _erase_unread(graph)


def _gather(node: Node) -> tuple[Node, Node, int, torch.dtype | None] | None:
    """(Tokens, order, choices, the dtype to which rows are cast), where a node is rows read through an order."""
    rows, dtype = cast_of(node)
    if isinstance(rows, Node) and rows.target is spread_rows.overload:
        x, order, _, choices = rows.args
        return x, order, choices, dtype
    if isinstance(rows, Node) and rows.target is operator.getitem:
        made = rows.args[0]
        if isinstance(made, Node) and made.target is collect_rows.backward_op.overload:
            grad, order, _, choices = made.args
            return grad, order, choices, dtype
    return None


def _tokens(graph: Graph, before: Node, gather: tuple) -> tuple[Node, Node, int]:
    """(Tokens, order, choices), the tokens cast as their rows were: each cast once, not once for each of its rows."""
    x, order, choices, dtype = gather
    if dtype is not None and x.meta["val"].dtype != dtype:
        with graph.inserting_before(before):
            made = graph.call_function(CASTS[0], (x, dtype))
        made.meta["val"] = x.meta["val"].to(dtype)
        x = made
    return x, order, choices


def _has_kernel(op: Op, args: tuple) -> bool:
    """Whether a kernel of ours runs a call."""
    return op.choose(torch.fx.map_arg(list(args), lambda n: n.meta["val"])).run is not op.reference


def _becomes(node: Node, op: Op, args: tuple) -> None:
    """Turn a call into one of an op with the same results, if a kernel of ours runs it."""
    if _has_kernel(op, args):
        node.target, node.args = op.overload, args


def _read_in_place(graph: Graph, node: Node) -> None:
    x, *rest = node.args
    if (found := _gather(x)) is not None:
        tokens, *read = _tokens(graph, node, found)
        _becomes(node, gathered_lora_linear, (tokens, *rest, *read))


def _read_in_place_backward(graph: Graph, node: Node) -> None:
    grad, x, *rest = node.args
    found = [_gather(grad), _gather(x)]
    if any(found):
        (grad, *grad_read), (x, *read) = (
            (side, None, 0) if gather is None else _tokens(graph, node, gather)
            for side, gather in zip((grad, x), found)
        )
        _becomes(node, gathered_lora_linear_backward, (grad, x, *rest, *grad_read, *read))


def _sum(graph: Graph, node: Node, y: Node, places: Node, choices: int) -> None:
    """Put a sum of rows in the place of a node; a cast to a wider dtype before it is part of it."""
    dtype, (rows, cast) = node.meta["val"].dtype, cast_of(y)
    if cast is not None and torch.promote_types(rows.meta["val"].dtype, cast) == cast:
        y = rows
    args = (y, places, choices, dtype)
    if not _has_kernel(sum_rows, args):
        return
    with graph.inserting_before(node):
        made = graph.call_function(sum_rows.overload, args)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)


def _erase_unread(graph: Graph) -> None:
    """Erase gathers, sums and casts that nothing reads any more."""
    ours = (collect_rows, collect_rows.backward_op, spread_rows, spread_rows.backward_op)
    targets = {*(op.overload for op in ours), *CASTS, operator.getitem}
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target in targets and not node.users:
            graph.erase_node(node)


PASS = Pass("gather_rows", "lower", run)
