"""Removes what lowering left dead (gradients nobody asked for), undoes what cancels out, and makes sure that no op is left over."""

from operator import getitem

import torch
from torch.fx import Graph, Node

from tunecompile.errors import LeftoverOp
from tunecompile.op import OPS
from tunecompile.pipeline import Context, Pass

aten = torch.ops.aten


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes):
        if node.target is aten.cat.default and (whole := _whole(node)) is not None:
            node.replace_all_uses_with(whole)
    graph.eliminate_dead_code()
    left = sorted({OPS[node.target].name for node in graph.nodes if node.target in OPS and not OPS[node.target].opaque})
    if left:
        raise LeftoverOp(ops=", ".join(left))


def _whole(cat: Node) -> Node | None:
    """The tensor a concatenation puts together again from all its pieces, in order."""
    pieces, shape = cat.args[0], cat.meta["val"].shape
    dim = (cat.args[1] if len(cat.args) > 1 else 0) % len(shape)
    base = pieces[0].args[0] if pieces[0].target is not getitem else pieces[0].args[0].args[0]
    start = 0
    for piece in pieces:
        if _piece_of(piece, dim) != (base, start):
            return None
        start = start + piece.meta["val"].shape[dim]
    same = isinstance(base, Node) and tuple(base.meta["val"].shape) == tuple(shape)
    return base if same else None


def _piece_of(node: Node, dim: int) -> tuple[Node, int] | None:
    """(tensor, offset) if the node is a piece of a tensor along `dim`, cut by slice or split."""
    if node.target is aten.slice.Tensor and len(node.args) < 5:
        source, along, start = (*node.args, 0, 0)[:3]
        return (source, start) if along % node.meta["val"].dim() == dim else None
    if node.target is getitem and node.args[0].target in (aten.split.Tensor, aten.split_with_sizes.default):
        split = node.args[0]
        along = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        sizes = [piece.shape[dim] for piece in split.meta["val"]]
        return (split.args[0], sum(sizes[:node.args[1]])) if along % node.meta["val"].dim() == dim else None
    return None


PASS = Pass("cleanup", "lower", run, requires=frozenset({"choose_provider"}))
