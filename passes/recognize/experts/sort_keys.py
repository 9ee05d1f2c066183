"""Sorts of expert ids go by keys of 16 bits.

A GPU sorts by 8 bits of its keys at a time: int64 takes eight passes, each of which clears memory and launches a
kernel, and 16 bits take two. The order is the same. Ids that are choices of `topk` are below the number it chooses of.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import between, is_mutation, written_value
from tunecompile.ir.rewrite import build_before, erase_dead, where_from
from tunecompile.passes.recognize.experts.ids import asked, is_ascending, source

__all__ = ["PASS"]

_SHAPED = ("reshape", "view", "flatten", "contiguous", torch.reshape, torch.flatten)
_LARGEST = torch.iinfo(torch.int16).max


def _chosen(ids: Node) -> Node | None:
    """The `topk` whose choices ids are."""
    node: Node | None = ids
    while node is not None and node.target is not operator.getitem:
        node = source(node, *_SHAPED)
    topk = None if node is None or node.args[1] != 1 else source(node, operator.getitem)
    return topk if topk is not None and topk.target in (torch.topk, "topk") else None


def _choices_of(topk: Node) -> int | None:
    """Among how many `topk` chooses; None where that is no constant."""
    if not topk.args:
        return None
    dim, scores = asked(topk, "k", "dim")[1], value(topk.args[0])
    number = scores.shape[-1 if dim is None else dim] if isinstance(scores, torch.Tensor) else None
    return number if isinstance(number, int) else None


def _ids_change(first: Node, last: Node) -> bool:
    """Whether whole numbers may be written to in between. Scores often are: `/=` makes their sums 1."""
    written = (written_value(node) for node in between(first, last) if is_mutation(node))
    return any(each is None or not each.is_floating_point() for each in written)


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("sort_keys")
    for node in list(graph.nodes):
        ids = source(node, torch.sort, "sort", torch.argsort, "argsort")
        if ids is None or not is_ascending(node) or value(ids).dtype is not torch.int64:
            continue
        topk = _chosen(ids)
        if topk is not None and (_choices_of(topk) or _LARGEST) < _LARGEST and not _ids_change(topk, node):
            if _narrow(graph, node, ids):
                tally.rewrote()
            else:
                tally.refuse(f"sort_keys: more than values and order is read{where_from(node)}")


def _narrow(graph: Graph, sort: Node, ids: Node) -> bool:
    """Sort by short keys; False where somebody reads more of the sort than its parts."""
    options = dict(sort.kwargs) | dict(zip(("dim", "descending"), sort.args[1:]))
    if sort.target in (torch.argsort, "argsort"):
        _, made = build_before(
            graph, sort, sort, lambda ids: torch.argsort(ids.to(torch.int16), **options), {"ids": ids}
        )
        sort.replace_all_uses_with(made[0])
        erase_dead(graph, [sort])
        return True
    parts = {user.args[1]: user for user in sort.users if user.target is operator.getitem}
    if len(parts) != len(sort.users) or not parts.keys() <= {0, 1}:
        return False

    def build(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.sort(ids.to(torch.int16), **options)
        return found[0].to(torch.int64), found[1]

    _, made = build_before(graph, sort, sort, build, {"ids": ids})
    for at, part in parts.items():
        part.replace_all_uses_with(made[at])
    erase_dead(graph, [*parts.values(), sort, *made])
    return True


PASS = Pass("sort_keys", "recognize", run)
