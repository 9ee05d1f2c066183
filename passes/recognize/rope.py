"""Rotary embedding of pairs that lie half a row apart, or beside each other."""

import operator
from typing import Any

import torch

from tunecompile.canonical import value
from tunecompile.match import Match
from tunecompile.ops import rope as op
from tunecompile.pipeline import recognize
from tunecompile.rewrite import rewrite

__all__ = ["PASS"]


def _halves(match: Match) -> str | None:
    x, half = value(match.bound["x"]), match.bound["half"]
    if not isinstance(half, int) or 2 * half != x.shape[-1]:
        return "not split in the middle"
    return _as_the_op_has_it(match, x.dtype)


@rewrite("rotate_half", to=lambda x, cos, sin: op(x, cos, sin, False), where=_halves)
def rotate_half(x, cos, sin, half):
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _as_the_op_has_it(match: Match, dtype: torch.dtype) -> str | None:
    """Whether a rotation in `dtype` gives what the op does, which has no gradient for its tables."""
    x, cos, sin, out = (value(node) for node in (match.bound["x"], match.bound["cos"], match.bound["sin"], match.outputs[0]))
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
    return "not halves" if match.bound["two"] != 2 or cos.shape[-1] * 2 != x.shape[-1] or sin.shape[-1] != cos.shape[-1] else None


@rewrite("halves_apart", where=_half_tables, to=lambda x, cos, sin: op(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), False))
def halves_apart(x, cos, sin, two):
    parts = torch.chunk(x, two, -1)
    first, second = parts[0], parts[1]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _pairs(match: Match) -> str | None:
    bound, x = match.bound, value(match.bound["x"])
    dtype, width, rank = bound.get("dtype", x.dtype), x.shape[-1], x.dim()
    if not isinstance(width, int) or width % 2:
        return "the width is no even number"
    if not _every_second(bound["second"], 1, width, rank) or not _every_second(bound["first"], 0, width, rank):
        return "not split into every second element and those between"
    if _dim(bound["dim"], rank + 1) != rank or (_dim(bound["start"], rank + 1), _dim(bound["end"], rank + 1)) != (rank - 1, rank):
        return "not stacked into pairs that lie beside each other"
    if not isinstance(dtype, torch.dtype) or torch.promote_types(dtype, x.dtype) != dtype:  # a narrower one rounds each gradient before their sum
        return "not cast to a wider dtype"
    return _as_the_op_has_it(match, dtype)


def _every_second(index: Any, first: int, width: int, rank: int) -> bool:
    """Whether an index takes each second element of the last dim, from `first` on, and all of the others."""
    *others, last = index if isinstance(index, tuple) and index else (index,)
    if not isinstance(last, slice) or last.step != 2 or last.start not in (first, first or None) or last.stop not in (None, width):
        return False
    whole = all(item is ... or (isinstance(item, slice) and item == slice(None)) for item in others)
    return whole and (any(item is ... for item in others) or len(others) == rank - 1)


def _dim(dim: Any, rank: int) -> int | None:
    """Counted from the first."""
    return dim % rank if isinstance(dim, int) else None


def turned(x, first, second, dim, start, end):
    return torch.stack((-x[second], x[first]), dim).flatten(start, end)  # in as many spellings as there are: the guard reads them


@rewrite("pairs", to=lambda x, cos, sin: op(x, cos, sin, True), where=_pairs)
def pairs(x, cos, sin, first, second, dim, start, end):
    return x * cos + turned(x, first, second, dim, start, end) * sin


@rewrite("pairs_cast", to=lambda x, cos, sin, dtype: op(x.to(dtype), cos, sin, True), where=_pairs)
def pairs_cast(x, cos, sin, dtype, first, second, dim, start, end):
    """The turn in x's own dtype, and what follows in a wider one: a turn rounds nothing."""
    return x.to(dtype) * cos + turned(x, first, second, dim, start, end).to(dtype) * sin


def anchors(graph):
    """Two tensors joined, one of them negated, or concatenated, a difference and a sum."""
    found = []
    for node in graph.nodes:
        if node.target in (torch.cat, torch.stack) and len(node.args[0]) == 2:
            targets = [getattr(part, "target", None) for part in node.args[0]]
            if operator.neg in targets or (node.target is torch.cat and targets == [operator.sub, operator.add]):
                found.append(node)
    return found


PASS = recognize("rope", [rotate_half, halves_apart, pairs, pairs_cast], anchors)
