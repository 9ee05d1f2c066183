"""Adapted linears that read the same input (q|k|v, gate|up) become one op: one XA, one matrix product, one dX."""

from collections.abc import Iterator
from operator import add, getitem, mul, setitem

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import is_barrier, is_mutation
from tunecompile.ir.rewrite import annotate
from tunecompile.ops import gated_activation, lora_linear

__all__ = ["PASS"]


VIEWS = {
    "view",
    "view_as",
    "reshape",
    "transpose",
    "permute",
    "chunk",
    "split",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "contiguous",
    "to",
    getitem,
    torch.chunk,
    torch.split,
    torch.transpose,
    torch.unsqueeze,
}
PURE = {
    torch.nn.functional.dropout,
    "to",
    "view",
    add,
    mul,
}  #: operations on weights, biases and adapter inputs that may be moved above another linear


def _siblings(graph: Graph) -> list[list[Node]]:
    """Adapted linears, grouped by input, adapters' dtype, presence of biases and adapter inputs, and gated activation.

    If attention and MLP read the same norm, gate|up are a group of their own: the activation's backward writes their
    gradients side by side.
    """
    groups: dict[tuple, list[Node]] = {}
    epoch = 0
    for node in graph.nodes:
        epoch += is_barrier(node)  # never across a mutation or a change of grad mode
        if node.target is lora_linear.overload and (y := _result(node)) is not None and not _changed_in_place(y):
            x, inputs, _, biases, _, _, _, *kind = node.args
            source = (
                x.args if x.target == "to" and len(x.args) == 2 else x
            )  # under autocast every linear has its own cast
            groups.setdefault(
                (epoch, source, bool(inputs), bool(biases), *kind, _leads_to_gradient(y), _gated(y)), []
            ).append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1]


def _result(node: Node) -> Node | None:
    return next((user for user in node.users if user.target is getitem and user.args[1] == 0), None)


def _readers(y: Node) -> Iterator[tuple[Node, Node]]:
    """(User, what it reads) of y, or of a view or slice of it."""
    for user in y.users:
        yield user, y
        if user.target in VIEWS:
            yield from _readers(user)


def _gated(y: Node) -> Node | None:
    """The gated activation that reads y or a slice of it."""
    return next((user for user, _ in _readers(y) if user.target is gated_activation.overload), None)


def _changed_in_place(y: Node) -> bool:
    """Whether y or a view of it is mutated, which autograd forbids for slices of one tensor."""
    return any(is_mutation(user) and not _is_copied(user, read) for user, read in _readers(y))


def _is_copied(user: Node, read: Node) -> bool:
    """Whether a mutation writes to another tensor what it reads: values to a cache."""
    to_self = user.target is setitem or (user.op == "call_method" and user.target != "set_")  # which makes an alias
    return to_self and user.args[0] is not read and user.kwargs.get("out") is not read


def _leads_to_gradient(y: Node) -> bool:
    """Whether an output depends on y through autograd. If not, its adapters' gradients must remain None."""
    seen, pending = set(), [y]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return True
            if user not in seen and _requires_grad(user):
                seen.add(user)
                pending.append(user)
    return False


def _requires_grad(node: Node) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value(node))
    return any(getattr(leaf, "requires_grad", True) for leaf in leaves) or not leaves


def _hoist(graph: Graph, node: Node, before: Node, order: dict[Node, int]) -> None:
    """Move the inputs of `node` (dequantisation, casts) above `before`. All are pure and depend on nothing later."""
    for argument in node.all_input_nodes:
        if order[argument] > order[before]:
            _hoist(graph, argument, before, order)
            before.prepend(argument)


def _movable(node: Node, first: Node, order: dict[Node, int]) -> bool:
    """Whether all inputs of `node` can be moved above `first`: they are pure functions of earlier values."""
    for argument in node.all_input_nodes:
        if order[argument] > order[first]:
            pure = argument.target in PURE or "tunecompile" in str(argument.target)
            if not pure or argument.target is lora_linear.overload or not _movable(argument, first, order):
                return False
    return True


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("grouped_linear")
    for group in _siblings(graph):
        order = {node: i for i, node in enumerate(graph.nodes)}
        first = group[0]
        if not all(_movable(node, first, order) for node in group[1:]):
            tally.refuse("a sibling's weights are computed from later values", len(group))
            continue
        for node in group[1:]:
            _hoist(graph, node, first, order)
        ys = tuple(_result(node) for node in group)
        _merge(graph, group, ys)
        tally.rewrote(anchors=len(group))


def _merge(graph: Graph, group: list[Node], ys: tuple[Node, ...]) -> None:
    columns = [[member for node in group for member in node.args[i]] for i in range(1, 7)]
    sizes = [value(y).shape[-1] for y in ys]
    with graph.inserting_before(group[0]):
        made = graph.call_function(lora_linear.overload, (group[0].args[0], *columns, *group[0].args[7:]))
        y = graph.call_function(getitem, (made, 0))
        parts = graph.call_method("split", (y, sizes, -1))
        for node in (made, y, parts):
            annotate(node, group[0])
        for i, old in enumerate(ys):
            part = graph.call_function(getitem, (parts, i))
            part.meta["example_value"] = value(old)
            annotate(part, old)
            old.replace_all_uses_with(part)
    for old, node in zip(ys, group):
        graph.erase_node(old)
        graph.erase_node(node)


PASS = Pass("grouped_linear", "recognize", run, requires=frozenset({"lora"}))
