"""Rotary embedding of pairs half a row apart or adjacent, also as a product of complex numbers."""

import operator
from typing import Any

import torch

from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.canonicalize import value
from tunecompile.ir.match import Match, cast
from tunecompile.ir.nodes import node_arg
from tunecompile.ir.rewrite import rewrite
from tunecompile.ops import rope as op

__all__ = ["PASS"]


def _halves(match: Match) -> str | None:
    x, half = value(match.bound["x"]), match.bound["half"]
    dtype = match.bound.get("dtype", x.dtype)
    if not isinstance(half, int) or 2 * half != x.shape[-1]:
        return "not split in the middle"
    return _as_the_op_has_it(match, dtype) if _is_wider(dtype, x.dtype) else "not cast to a wider dtype"


@rewrite("rotate_half", to=lambda x, cos, sin: op(x, cos, sin, False), where=_halves)
def rotate_half(x, cos, sin, half):
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@rewrite("rotate_half_cast", to=lambda x, cos, sin, dtype: op(x.to(dtype), cos, sin, False), where=_halves)
def rotate_half_cast(x, cos, sin, half, dtype):
    """Each product has a cast of its own (ModernBERT), so that eager rounds two gradients and sums them."""
    wide = x.to(dtype)
    return x.to(dtype) * cos + torch.cat((-wide[..., half:], wide[..., :half]), -1) * sin


def _is_wider(dtype: Any, than: torch.dtype) -> bool:
    """Whether it is a dtype that holds all values of the other. (A narrower one rounds gradients before their sum.)"""
    return isinstance(dtype, torch.dtype) and torch.promote_types(dtype, than) == dtype


def _as_the_op_has_it(match: Match, dtype: torch.dtype) -> str | None:
    """Check that a rotation in `dtype` is the op's, which has no gradient for its tables."""
    x, cos, sin, out = (
        value(node) for node in (match.bound["x"], match.bound["cos"], match.bound["sin"], match.outputs[0])
    )
    if tuple(out.shape) != tuple(x.shape):
        return "cos and sin are larger than x"
    if not isinstance(cos, torch.Tensor) or not isinstance(sin, torch.Tensor):
        return "cos and sin are no tensors"
    if cos.dtype != sin.dtype or cos.requires_grad or sin.requires_grad:
        return "cos and sin differ in dtype or need a gradient"
    return None if out.dtype == torch.promote_types(dtype, cos.dtype) else f"the result is {out.dtype}"


def _half_tables(match: Match) -> str | None:
    x, cos, sin = (value(match.bound[name]) for name in ("x", "cos", "sin"))
    if (reason := _as_the_op_has_it(match, x.dtype)) is not None:
        return reason
    return (
        "not halves"
        if match.bound.get("two", 2) != 2 or cos.shape[-1] * 2 != x.shape[-1] or sin.shape[-1] != cos.shape[-1]
        else None
    )


@rewrite(
    "halves_apart",
    where=_half_tables,
    to=lambda x, cos, sin: op(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), False),
)
def halves_apart(x, cos, sin, two):
    parts = torch.chunk(x, two, -1)
    first, second = parts[0], parts[1]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _split(match: Match) -> str | None:
    x, first, second = value(match.bound["x"]), match.bound["first"], match.bound["second"]
    width, rank = x.shape[-1], x.dim()
    if not isinstance(width, int) or width % 2:
        return "the width is no even number"
    beside = _every_second(first, 0, width, rank) and _every_second(second, 1, width, rank)
    return (
        _half_tables(match)
        if beside or _are_halves(first, second, width, rank)
        else "split into neither halves nor every second element"
    )


def _are_halves(first: Any, second: Any, width: int, rank: int) -> bool:
    """Whether two indices select the halves of the last dim, and all of the other dims."""
    left, right = (_last_slice(index, rank) for index in (first, second))
    if left is None or right is None:
        return False
    return left.indices(width) == (0, width // 2, 1) and right.indices(width) == (width // 2, width, 1)


def _joined(x, cos, sin, first, second, match):
    """Reorder adjacent pairs to halves, the layout of the model's result."""
    width, rank = value(match.bound["x"]).shape[-1], value(match.bound["x"]).dim()
    halves = (
        x
        if _are_halves(match.bound["first"], match.bound["second"], width, rank)
        else torch.cat((x[first], x[second]), -1)
    )
    return op(halves, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), False)


@rewrite("halves_of_slices", to=_joined, where=_split)
def halves_of_slices(x, cos, sin, first, second):
    return torch.cat((x[first] * cos - x[second] * sin, x[second] * cos + x[first] * sin), -1)


def _pairs(match: Match) -> str | None:
    bound, x = match.bound, value(match.bound["x"])
    dtype, width, rank = bound.get("dtype", x.dtype), x.shape[-1], x.dim()
    if not isinstance(width, int) or width % 2:
        return "the width is no even number"
    if not _every_second(bound["second"], 1, width, rank) or not _every_second(bound["first"], 0, width, rank):
        return "not split into every second element and those between"
    if not _beside_again(bound, rank):
        return "not stacked into pairs that lie beside each other"
    return _as_the_op_has_it(match, dtype) if _is_wider(dtype, x.dtype) else "not cast to a wider dtype"


def _every_second(index: Any, first: int, width: int, rank: int) -> bool:
    """Whether an index selects every second element of the last dim from `first` on, and all of the other dims."""
    last = _last_slice(index, rank)
    return last is not None and last.indices(width) == (first, width, 2)


def _last_slice(index: Any, rank: int) -> slice | None:
    """The slice of the last dim, if an index has one and selects all of the other dims."""
    *others, last = index if isinstance(index, tuple) and index else (index,)
    whole = all(item is ... or (isinstance(item, slice) and item == slice(None)) for item in others)
    return (
        last
        if isinstance(last, slice) and whole and (any(item is ... for item in others) or len(others) == rank - 1)
        else None
    )


def _beside_again(bound: dict[str, Any], rank: int) -> bool:
    """Whether stacking and flattening gives adjacent pairs."""
    return _dim(bound["dim"], rank + 1) == rank and (_dim(bound["start"], rank + 1), _dim(bound["end"], rank + 1)) == (
        rank - 1,
        rank,
    )


def _dim(dim: Any, rank: int) -> int | None:
    """A dimension as a non-negative index."""
    return dim % rank if isinstance(dim, int) else None


def turned(x, first, second, dim, start, end):
    return torch.stack((-x[second], x[first]), dim).flatten(start, end)  # the spellings vary: the guard checks them


@rewrite("pairs", to=lambda x, cos, sin: op(x, cos, sin, True), where=_pairs)
def pairs(x, cos, sin, first, second, dim, start, end):
    return x * cos + turned(x, first, second, dim, start, end) * sin


@rewrite("pairs_cast", to=lambda x, cos, sin, dtype: op(x.to(dtype), cos, sin, True), where=_pairs)
def pairs_cast(x, cos, sin, dtype, first, second, dim, start, end):
    """The pairs are rearranged in x's dtype, which rounds nothing, and the arithmetic is in a wider one."""
    return x.to(dtype) * cos + turned(x, first, second, dim, start, end).to(dtype) * sin


def _pairs_of_slices(match: Match) -> str | None:
    x = value(match.bound["x"])
    width, rank = x.shape[-1], x.dim()
    if (
        not isinstance(width, int)
        or not _every_second(match.bound["first"], 0, width, rank)
        or not _every_second(match.bound["second"], 1, width, rank)
    ):
        return "not split into every second element and those between"
    return (
        _half_tables(match) if _beside_again(match.bound, rank) else "not stacked into pairs that lie beside each other"
    )


@rewrite("pairs_of_slices", to=lambda x, cos, sin: op(x, _twice(cos), _twice(sin), True), where=_pairs_of_slices)
def pairs_of_slices(x, cos, sin, first, second, dim, start, end):
    return torch.stack((x[first] * cos - x[second] * sin, x[second] * cos + x[first] * sin), dim).flatten(start, end)


def _complex(match: Match) -> str | None:
    x, turns, out, rank = (
        value(match.bound["x"]),
        value(match.bound["turns"]),
        value(match.outputs[0]),
        value(match.bound["x"]).dim(),
    )
    if not isinstance(turns, torch.Tensor) or not turns.is_complex() or turns.requires_grad or turns.is_conj():
        return "what turns is no plain complex tensor, or needs a gradient"
    if (_dim(match.bound["start"], rank + 1), _dim(match.bound["end"], rank + 1)) != (rank - 1, rank):
        return "the parts are not joined again"
    if turns.dim() == 0 or 2 * turns.shape[-1] != x.shape[-1] or tuple(out.shape) != tuple(x.shape):
        return "not one turn for each pair"
    return None if out.dtype == torch.promote_types(x.dtype, turns.dtype.to_real()) else f"the result is {out.dtype}"


def _twice(part):
    """Each angle twice in succession."""
    return torch.stack((part, part), -1).flatten(-2, -1)


def _turned(x, turns):
    parts = torch.view_as_real(turns)
    return op(x, _twice(parts[..., 0]), _twice(parts[..., 1]), True)


@rewrite("complex_numbers", to=_turned, where=_complex)
def complex_numbers(x, turns, start, end):
    """A product with cos + i sin."""
    return torch.view_as_real(torch.view_as_complex(cast(x).unflatten(-1, (-1, 2))) * turns).flatten(start, end)


def _is_turned(node):
    product = node_arg(node, 0) if node.target is torch.view_as_real else None
    if product is None or product.target is not operator.mul:
        return False
    return any(getattr(side, "target", None) is torch.view_as_complex for side in product.args)


def _is_joined(node):
    """Whether it joins two parts, one negated, or a difference and a sum."""
    if node.target not in (torch.cat, torch.stack) or len(node.args[0]) != 2:
        return False
    targets = [getattr(part, "target", None) for part in node.args[0]]
    return operator.neg in targets or targets == [operator.sub, operator.add]


def _factors(node):
    """The tensors that are multiplied, of each of the products that a sum or a difference is of."""
    return [frozenset(side.all_input_nodes) for side in node.args if getattr(side, "target", None) is operator.mul]


def _is_first_of_pair(node):
    """Whether it is `a c - b s` beside an `a s + b c`, and both are joined in another way."""
    pair = _factors(node) if node.target is operator.sub and not any(map(_is_joined, node.users)) else []
    if len(pair) != 2 or len(pair[0] | pair[1]) != 4:
        return False
    readers = {reader for factor in pair[0] for product in factor.users for reader in product.users}
    sums = [made for reader in readers if reader.target is operator.add and len(made := _factors(reader)) == 2]
    return any(
        left | right == pair[0] | pair[1] and len(left & pair[0]) == len(left & pair[1]) == 1 for left, right in sums
    )


def anchors(graph):
    """Nodes that suggest a rotation: joined halves, one negated; a difference and a sum; or a complex product."""
    return [node for node in graph.nodes if _is_joined(node) or _is_first_of_pair(node) or _is_turned(node)]


HALVES = [rotate_half, rotate_half_cast, halves_apart, halves_of_slices]

PASS = recognize("rope", [*HALVES, pairs, pairs_cast, pairs_of_slices, complex_numbers], anchors)
