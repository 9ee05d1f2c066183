"""Rotary embedding in the rotate-half layout."""

import operator

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
    out = value(match.outputs[0])
    if tuple(out.shape) != tuple(x.shape):
        return "cos and sin are larger than x"
    cos, sin = value(match.bound["cos"]), value(match.bound["sin"])
    if (reason := _tables(cos, sin)) is not None:
        return reason
    return None if out.dtype == torch.promote_types(x.dtype, cos.dtype) else f"the result is {out.dtype}"


@rewrite("rotate_half", to=lambda x, cos, sin: op(x, cos, sin), where=_halves)
def rotate_half(x, cos, sin, half):
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _tables(cos, sin) -> str | None:
    """The op has no gradient for its tables."""
    if not isinstance(cos, torch.Tensor) or not isinstance(sin, torch.Tensor):
        return "cos and sin are no tensors"
    return "cos and sin differ in dtype or need a gradient" if cos.dtype != sin.dtype or cos.requires_grad or sin.requires_grad else None


def _half_tables(match: Match) -> str | None:
    x, cos, sin = (value(match.bound[name]) for name in ("x", "cos", "sin"))
    if (reason := _tables(cos, sin)) is not None:
        return reason
    if match.bound["two"] != 2 or cos.shape[-1] * 2 != x.shape[-1] or sin.shape[-1] != cos.shape[-1]:
        return "not halves"
    if tuple(value(match.outputs[0]).shape) != tuple(x.shape) or value(match.outputs[0]).dtype != torch.promote_types(x.dtype, cos.dtype):
        return "the result has another shape or dtype"
    return None


@rewrite("halves_apart", where=_half_tables, to=lambda x, cos, sin: op(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)))
def halves_apart(x, cos, sin, two):
    parts = torch.chunk(x, two, -1)
    first, second = parts[0], parts[1]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def anchors(graph):
    """Concatenations of two, one of them negated, or of a difference and a sum."""
    found = []
    for node in graph.nodes:
        if node.target is torch.cat and len(node.args[0]) == 2:
            targets = [getattr(part, "target", None) for part in node.args[0]]
            if operator.neg in targets or targets == [operator.sub, operator.add]:
                found.append(node)
    return found


PASS = recognize("rope", [rotate_half, halves_apart], anchors)
