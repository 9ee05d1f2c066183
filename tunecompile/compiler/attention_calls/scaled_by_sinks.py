"""Sinks that scale the result of attention (Granite with windows): softmax(s) v sigmoid(logsumexp(s) - sink).

That is what a column of sinks beside the scores gives: exp(s) v / (sum exp(s) + exp(sink)), and sum exp(s) divided by
that sum is sigmoid(logsumexp(s) - sink).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from tunecompile.compiler.attention_calls.reading import Reading, asked, calls, casts
from tunecompile.ir.canonicalize import value

_VIEWS = ("expand", "reshape", "view", "unsqueeze")


@dataclass(frozen=True)
class Scaled:
    """A product of weights and values, of which each head's rows are scaled."""

    product: Node
    scores: Any  #: whose logsumexp is compared with sinks
    sinks: Node  #: [H]


def scaled_by_sinks(node: Node, read: Reading) -> Scaled | None:
    """Return what a node scales by sinks, and note the calls of the scale; None of another node, noting nothing."""
    if not calls(node, "mul") or node.kwargs:
        return None
    for product, factor in (node.args, node.args[::-1]):
        taken = Reading()
        found = _scaled(product, factor, taken) if isinstance(product, Node) else None
        if found is not None and value(product).dtype == value(node).dtype:
            read.inside += [product, *taken.inside]
            return found
    return None


def _scaled(product: Node, factor: Any, read: Reading) -> Scaled | None:
    rows, made = value(product), value(factor) if isinstance(factor, Node) else None
    if not (isinstance(rows, Tensor) and isinstance(made, Tensor) and rows.dim() == made.dim() == 4):
        return None
    gate: Any = read.through(factor, _casts_or_stands_apart)
    if not calls(gate, "sigmoid") or gate.kwargs:
        return None
    difference: Any = read.through(read.step(gate), _casts_or_stands_apart)
    if not calls(difference, "sub") or len(difference.args) != 2 or difference.kwargs:
        return None
    read.inside.append(difference)
    total: Any = read.through(difference.args[0], _casts_or_stands_apart)
    if not calls(total, "logsumexp") or not isinstance(total.args[0], Node):
        return None
    scores, dim = total.args[0], asked(total, "dim", 1)
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if dim not in (-1, 3) or value(scores).dim() != 4:
        return None
    read.inside.append(total)
    scores = read.through(scores, casts)
    rank = value(difference).dim()
    if tuple(value(difference.args[0]).shape) != tuple(value(difference).shape) or rank not in (3, 4):
        return None
    sinks = read_sinks(difference.args[1], read, rank - 2)
    return None if sinks is None or value(sinks).shape[0] != rows.shape[1] else Scaled(product, scores, sinks)


def _casts_or_stands_apart(node: Node) -> bool:
    """Whether it is a cast, or adds a last dimension of size 1."""
    if casts(node):
        return True
    given = value(node.args[0]) if node.args else None
    if not isinstance(given, Tensor):
        return False
    if calls(node, "unsqueeze"):
        return asked(node, "dim", 1) in (-1, given.dim())
    return node.target is operator.getitem and node.args[1] in (
        (Ellipsis, None),
        (*[slice(None)] * given.dim(), None),
    )


def read_sinks(given: Any, read: Reading, behind: int) -> Node | None:
    """Return the numbers [H] that stand, viewed as [.., H, 1, ..], beside scores or their sums; note their views.

    Args:
        given: the node that stands there.
        read: notes the calls.
        behind: dimensions behind that of the heads.
    """
    before = len(read.inside)
    sinks = read.through(given, lambda each: casts(each) or calls(each, *_VIEWS))
    made = value(sinks) if isinstance(sinks, Node) else None
    if not isinstance(made, Tensor) or made.dim() != 1:
        return None
    shapes = [tuple(value(each).shape) for each in read.inside[before:] if value(each).numel() == made.numel()]
    heads = made.shape[0]
    by_head = bool(shapes) and shapes[0][-1 - behind :] == (heads, *[1] * behind)  # before they are expanded
    return sinks if by_head else None
