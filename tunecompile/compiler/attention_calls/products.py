"""The two products of attention that is written out: queries times keys, and weights times values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from tunecompile.compiler.attention_calls.found import Order, Term
from tunecompile.compiler.attention_calls.reading import Reading, asked, calls, is_number
from tunecompile.ir.canonicalize import value


@dataclass(frozen=True)
class Product:
    """A product of two operands."""

    left: Any
    right: Any
    orders: tuple[Order, Order] = (None, None)  #: of query and keys; or of values and the result
    factor: float = 1.0
    added: tuple[Term, ...] = ()


def weighted(node: Any) -> Product | None:
    """Weights times values."""
    if calls(node, "matmul", "bmm") and len(node.args) == 2:
        return Product(*node.args)
    if (found := _einsum(node)) is None:
        return None
    for (weights, w), (values, v), made in (found, (found[1], found[0], found[2])):
        a, b, q, k = w
        width = set(made) - {a, b, q}
        if len(width) == 1 and {a, b, k} | width == set(v):
            (d,) = width
            orders = _order(v, a + b + k + d), _order(a + b + q + d, made)
            return Product(weights, values, orders)
    return None


def scored(node: Any, factor: float, read: Reading) -> Product | None:
    """Queries times keys."""
    if calls(node, "matmul", "bmm") and len(node.args) == 2:
        left, right, added = *node.args, ()
    elif calls(node, "baddbmm"):
        names = dict(zip(("input", "batch1", "batch2"), node.args)) | node.kwargs
        beta, alpha = names.get("beta", 1), names.get("alpha", 1)
        if not (is_number(beta) and is_number(alpha) and len(names.keys() - {"beta", "alpha"}) == 3):
            return None
        left, right = names["batch1"], names["batch2"]
        added = (Term(names["input"], factor=beta * factor, joined=True),) if beta else ()
        factor = factor * alpha
    elif (found := _einsum(node)) is not None:
        read.inside.append(node)
        for (queries, x), (keys, y), made in (found, (found[1], found[0], found[2])):
            a, b, q, k = made
            width = set(x) - {a, b, q}
            if len(width) == 1 and {a, b, k} | width == set(y):
                (d,) = width
                return Product(queries, keys, (_order(x, a + b + q + d), _order(y, a + b + k + d)), factor)
        return None
    else:
        return None
    if (turned := _turned(right)) is None:
        return None
    read.inside += [node, right]
    return Product(left, turned[0], (None, turned[1]), factor, added)


def _einsum(node: Any) -> tuple[tuple[Any, str], tuple[Any, str], str] | None:
    """((operand, its letters), the same of the other, letters of the result) of two tensors of four dimensions."""
    if not calls(node, "einsum") or not isinstance(node.args[0], str):
        return None
    operands = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
    inputs, arrow, made = node.args[0].replace(" ", "").partition("->")
    letters = [*inputs.split(","), made]
    if not arrow or len(operands) != 2 or len(letters) != 3:
        return None
    free = [each for each in "ZYXW" if each not in node.args[0]]
    letters = [each.replace("...", "".join(free[: 7 - len(each)])) for each in letters]
    whole = all(len(each) == 4 == len(set(each)) and each.isalpha() for each in letters)
    return ((operands[0], letters[0]), (operands[1], letters[1]), letters[2]) if whole else None


def _order(given: str, wanted: str) -> Order:
    return None if given == wanted else tuple(given.index(letter) for letter in wanted)


def _turned(node: Any) -> tuple[Node, Order] | None:
    """(keys, their order) of transposed keys."""
    made = value(node) if isinstance(node, Node) else None
    if not isinstance(node, Node) or not isinstance(made, Tensor) or made.dim() not in (3, 4) or not node.args:
        return None
    rank = made.dim()
    source: Any = node.args[0]
    if calls(node, "permute") and rank == 4:
        dims: Any = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
        first, second, width, keys = (dim % 4 for dim in dims)
        order = (first, second, keys, width)
        return source, None if order == (0, 1, 2, 3) else order
    turns = node.target is getattr and node.args[1] == "mT"
    if calls(node, "transpose"):
        pair = asked(node, "dim0", 1), asked(node, "dim1", 2)
        turns = all(isinstance(dim, int) for dim in pair) and {dim % rank for dim in pair} == {rank - 2, rank - 1}
    return (source, None) if turns else None
