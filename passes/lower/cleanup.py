"""Remove dead code after lowering, and reshapes and concatenations that cancel out. No op may be left over."""

from operator import getitem

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.errors import LeftoverOp
from tunecompile.ir.op import OPS, returns_view

__all__ = ["PASS"]

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes):
        if node.target is aten.cat.default and (whole := _whole(node)) is not None and not _escapes(node):
            node.replace_all_uses_with(whole)
        elif node.target in RESHAPES and (origin := _origin(node)) is not None and not _escapes(node):
            node.replace_all_uses_with(origin)
    graph.eliminate_dead_code()
    left = sorted({OPS[node.target].name for node in graph.nodes if node.target in OPS and not OPS[node.target].opaque})
    if left:
        raise LeftoverOp(ops=", ".join(left))


def _whole(cat: Node) -> Node | None:
    """The tensor that a concatenation reassembles from all its pieces, in order. (One of other strides stays: views of
    the concatenation, which is dense, may be none of its pieces' transpose.)"""
    shape = cat.meta["val"].shape
    dim = (cat.args[1] if len(cat.args) > 1 else 0) % len(shape)
    base, offset = None, 0
    for node in cat.args[0]:
        piece = _piece_of(node, dim)
        if piece is None or piece != (base or piece[0], offset):
            return None
        base, offset = piece[0], offset + node.meta["val"].shape[dim]
    return base if base is not None and _layout(base) == _layout(cat) else None


def _origin(view: Node) -> Node | None:
    """The tensor that was given another shape and is given its own again here. (Inductor fixes the memory of what it
    reshapes, and would copy a product that could have been written where it is read.)"""
    source = view.args[0]
    while source.target in RESHAPES:
        source = source.args[0]
    return source if _layout(source) == _layout(view) else None


def _layout(node: Node) -> tuple:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype


def _escapes(node: Node) -> bool:
    """Whether the graph returns the node's memory. (A caller may mutate one result, and must not mutate two.)"""
    return any(user.op == "output" or (_is_view(user) and _escapes(user)) for user in node.users)


def _is_view(node: Node) -> bool:
    return returns_view(node.target) or node.target is getitem


def _piece_of(node: Node, dim: int) -> tuple[Node, int] | None:
    """(tensor, offset) if the node is a piece of a tensor along `dim`, cut by slice or split."""
    if node.target is aten.slice.Tensor and len(node.args) < 5:
        source, along, start = (*node.args, 0, 0)[:3]
        return (source, start) if along % node.meta["val"].dim() == dim else None
    if node.target is getitem and node.args[0].target in (aten.split.Tensor, aten.split_with_sizes.default):
        split = node.args[0]
        along = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        sizes = [piece.shape[dim] for piece in split.meta["val"]]
        return (split.args[0], sum(sizes[: node.args[1]])) if along % node.meta["val"].dim() == dim else None
    return None


PASS = Pass("cleanup", "lower", run, requires=frozenset({"choose_provider"}))
