"""Copies of tokens to experts and back, which index by a sort's order and by its inverse, become ops.

Otherwise their gradients use atomic additions, in a different order each time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.nodes import is_disturbed, is_mutation
from tunecompile.ir.rewrite import annotate, erase_dead, replace, where_from
from tunecompile.ops import collect_rows, inverse_order, spread_rows
from tunecompile.passes.recognize.experts.ids import is_ascending

__all__ = ["PASS"]

_ARANGE = {"dtype", "device"}  #: the keywords that an arange from 0 may have


def _orders(graph: Graph) -> Iterator[Node]:
    """Nodes that are permutations: the second result of a sort of one dim, or an argsort."""
    for node in graph.nodes:
        one_dim = getattr(value(node), "ndim", None) == 1
        if one_dim and node.target is operator.getitem and node.args[1] == 1:
            source = node.args[0]
            if isinstance(source, Node) and source.target in (torch.sort, "sort"):
                yield node
        elif one_dim and node.target in (torch.argsort, "argsort"):
            yield node


def _inverses(order: Node) -> list[Node]:
    """Nodes that hold the inverse: an empty tensor, filled at the order with 0, 1, ...; or a sort of the order."""
    sorts = [user for user in order.users if user.target in (torch.argsort, "argsort") and user.args[:1] == (order,)]
    found = [user for user in sorts if is_ascending(user)]
    for user in order.users:
        if user.target is operator.setitem and user.args[1] is order:
            place, numbers = user.args[0], user.args[2]
            if (
                isinstance(place, Node)
                and place.target in (torch.empty_like, torch.zeros_like)
                and place.args == (order,)
                and _counts(numbers, order)
                and sum(is_mutation(other) for other in place.users) == 1
            ):
                found.append(place)
    return found


def _counts(numbers: object, order: Node) -> bool:
    """Whether a node is 0, 1, ... for each element of the order."""
    return (
        isinstance(numbers, Node)
        and numbers.target is torch.arange
        and len(numbers.args) == 1
        and numbers.kwargs.keys() <= _ARANGE
        and value(numbers).dtype == torch.int64
        and value(numbers).shape[0] == value(order).shape[0]
    )


def _reads(index: Node) -> Iterator[Node]:
    """Calls that read floating-point rows by an index."""
    for user in index.users:
        reads = user.target is operator.getitem and user.args[1] is index and isinstance(user.args[0], Node)
        if reads and value(user.args[0]).is_floating_point():
            yield user


def _shares(order: Node) -> Iterator[tuple[Node, int]]:
    """(index, rows per token): the order itself, or its quotient by the rows per token."""
    yield order, 1
    for user in order.users:
        divides = user.target in (operator.floordiv, torch.floor_divide) and len(user.args) == 2
        if divides and user.args[0] is order and isinstance(user.args[1], int) and user.args[1] > 0:
            yield user, user.args[1]


def _summed(read: Node) -> tuple[Node, int] | None:
    """(The sum over a token's rows, their number), if the rows that were read have no other user."""
    if len(read.users) != 1:
        return None
    (shaped,) = read.users
    if shaped.target not in ("view", "reshape", torch.reshape, "unflatten") or len(shaped.users) != 1:
        return None
    rows, parts = value(read), value(shaped)
    (total,) = shaped.users
    asked = {**dict(zip(("dim", "keepdim"), total.args[1:])), **total.kwargs}
    if (
        total.target not in ("sum", torch.sum)
        or asked.pop("dim", None) not in (1, [1], (1,))
        or asked.pop("keepdim", False)
        or asked.keys() - {"dtype"}
        or parts.dim() != rows.dim() + 1
        or tuple(parts.shape[2:]) != tuple(rows.shape[1:])
        or not isinstance(parts.shape[1], int)
    ):
        return None
    return total, parts.shape[1]


def _places(graph: Graph, order: Node) -> Node:
    """The inverse of the order, computed where the order is."""
    with graph.inserting_after(order):
        made = graph.call_function(inverse_order.overload, (order,))
    annotate(made, order)
    return made


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("expert_rows")
    for order in list(_orders(graph)):
        if any(is_mutation(user) and user.args[0] is order for user in order.users):
            continue
        inverses = _inverses(order)
        reads = [(read, share, True) for index, share in _shares(order) for read in _reads(index)]
        reads += [(read, 1, False) for index in inverses for read in _reads(index)]
        if not inverses and all(share == 1 for _, share, _ in reads):
            continue  # a sort for another purpose
        places, before = _places(graph, order), set(graph.nodes)
        for read, share, forth in reads:
            reason = _rewrite(graph, read, order, places, share, forth)
            if reason is None:
                tally.rewrote()
            else:
                tally.refuse(f"expert_rows: {reason}{where_from(read)}")
        _forget(graph, order, inverses, before)


def _rewrite(graph: Graph, read: Node, order: Node, places: Node, share: int, forth: bool) -> str | None:
    """Replace one read by an op; return the reason why not, or None."""
    source = read.args[0]
    if value(source).shape[0] * share != value(order).shape[0]:
        return "rows are left out, or read twice"
    if forth:
        bound = {"x": source, "order": order, "places": places, "choices": share}
        reason = replace(graph, (read,), spread_rows, bound)
        made = [read]
    elif (summed := _summed(read)) is not None and not is_disturbed(read, summed[0], whole_numbers=False):
        total, share = summed
        bound = {"y": source, "order": order, "places": places, "choices": share}
        dtype = dtype_of(total)
        reason = replace(graph, (total,), partial(_collect, None if dtype == dtype_of(source) else dtype), bound)
        made = [total, total.args[0], read]
    else:
        bound = {"x": source, "order": places, "places": order, "choices": 1}
        reason = replace(graph, (read,), spread_rows, bound)
        made = [read]
    if reason is None:
        erase_dead(graph, made)
    return reason


def _collect(dtype, y, order, places, choices):
    """Collect rows in the sum's dtype: autocast sums in fp32."""
    return collect_rows(y if dtype is None else y.to(dtype), order, places, choices)


def _forget(graph: Graph, order: Node, inverses: list[Node], before: set[Node]) -> None:
    """Erase the nodes that computed the inverse, if they have no users left."""
    for place in inverses:
        written = [user for user in place.users if user.target is operator.setitem]
        if place not in before or len(place.users) != len(written):
            continue
        for user in written:
            numbers = user.args[2]
            graph.erase_node(user)
            erase_dead(graph, [numbers])
        erase_dead(graph, [place])
    for user in list(order.users):
        if user.target is inverse_order.overload and not user.users:
            graph.erase_node(user)


PASS = Pass("expert_rows", "recognize", run)
