"""Calls of a graph, read from a result upward, and what they do to the rows of attention."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Node

from tunecompile.ir.canonicalize import name_of, value


class Reading:
    """Calls that were read, from the result upward."""

    def __init__(self) -> None:
        self.inside: list[Node] = []
        self.heads = 0  #: of a view that tells them apart from rows

    def step(self, node: Node) -> Any:
        self.inside.append(node)
        return node.args[0]

    def through(self, node: Any, passes: Callable[[Node], bool]) -> Any:
        while isinstance(node, Node) and node.op in ("call_function", "call_method") and passes(node):
            if _regroups(node):
                apart = next(value(each) for each in (node, node.args[0]) if value(each).dim() == 4)
                self.heads = apart.shape[1] if isinstance(apart.shape[1], int) else self.heads
            node = self.step(node)
        return node


def calls(node: Any, *names: str) -> bool:
    """Return whether a node calls an operation of one of these names."""
    called = isinstance(node, Node) and node.op in ("call_function", "call_method") and bool(node.args)
    return called and name_of(node.target) in names


def is_number(given: Any) -> bool:
    """Return whether it is a number, and no truth value."""
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def asked(node: Node, name: str, position: int) -> Any:
    """Return an argument, by its position or its name; None where there is none."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def casts(node: Node) -> bool:
    """Return whether it is a cast from one floating dtype to another. (Whole numbers would be others.)"""
    if not calls(node, "to", "float", "type_as", "type"):
        return False
    return all(isinstance(each, Tensor) and each.is_floating_point() for each in (value(node), value(node.args[0])))


def _regroups(node: Node) -> bool:
    """Whether it joins rows and heads to one dimension, or parts them."""
    if not calls(node, "view", "reshape", "flatten", "unflatten"):
        return False
    before, after = value(node.args[0]), value(node)
    if not (isinstance(before, Tensor) and isinstance(after, Tensor) and {before.dim(), after.dim()} == {3, 4}):
        return False
    return tuple(before.shape[-2:]) == tuple(after.shape[-2:])


def casts_or_regroups(node: Node) -> bool:
    """Return whether it is a cast, or a view that joins or parts rows and heads."""
    return casts(node) or _regroups(node)


def keeps_all(node: Node) -> bool:
    """Return whether it is a cast, dropout that drops nothing, or a view of rows and heads."""
    if calls(node, "dropout"):
        return asked(node, "p", 1) == 0 or asked(node, "training", 2) is False
    return casts_or_regroups(node)


def is_last(dim: Any, node: Node) -> bool:
    """Return whether `dim` is the last dimension of a node's value."""
    made = value(node)
    return dim == -1 or (isinstance(made, Tensor) and dim == made.dim() - 1)


def is_all_but_last(node: Any) -> bool:
    """Return whether it leaves out the last column, and nothing else."""
    if not (isinstance(node, Node) and node.target is operator.getitem and isinstance(node.args[1], tuple)):
        return False
    *others, last = node.args[1]
    whole = others == [Ellipsis] or others == [slice(None)] * 3
    return whole and last == slice(None, -1)
