"""Expert ids in sorted order, and the offsets that are counted from them."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from tunecompile.ir.canonicalize import value

__all__ = ["asked", "counted", "is_ascending", "source"]


def asked(node: Node, *names: str) -> list:
    """Arguments of a call after the first, given by position or by name."""
    given = {**dict(zip(names, node.args[1:])), **node.kwargs}
    return [given.get(name) for name in names]


def source(node: object, *targets: object) -> Node | None:
    """The first argument, if the node is a call of one of these targets."""
    called = isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets
    return node.args[0] if called and node.args and isinstance(node.args[0], Node) else None


def counted(offsets: Node) -> Node | None:
    """The sorted ids of which offsets are the cumulative counts per expert; ids outside 0 ... E - 1 are not counted."""
    counts = source(offsets, torch.cumsum, "cumsum")
    if counts is None or asked(offsets, "dim", "dtype")[0] not in (0, -1):
        return None
    cast = source(counts, torch.histc, "histc")
    experts = value(offsets).shape[0]
    if cast is None or asked(counts, "bins", "min", "max") != [experts, 0, experts - 1]:
        return None
    ids = source(cast, "to", "int", "float") or cast
    return ids if _sorted(ids) else None


def _sorted(ids: Node) -> bool:
    """Whether a node is the first result of an ascending sort."""
    sort = source(ids, operator.getitem)
    return sort is not None and ids.args[1] == 0 and sort.target in (torch.sort, "sort") and is_ascending(sort)


def is_ascending(sort: Node) -> bool:
    """Whether a sort, or an argsort, is of one dimension and from the least to the greatest."""
    dim, descending = asked(sort, "dim", "descending")
    plain = sort.kwargs.keys() <= {"dim", "descending", "stable"} and len(sort.args) <= 3
    return plain and not descending and dim in (None, 0, -1) and getattr(value(sort.args[0]), "ndim", None) == 1
