"""Tile over the tokens where the layer's plan says so: replace ops and their backwards by their tiled forms.

A tiled form saves only its inputs. So backwards are replaced first, and then the ops whose other results have no user
left."""

import operator
from typing import Any

from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import OPS, Op, formats
from tunecompile.notes import note

__all__ = ["PASS"]


def run(graph: Graph, context: Context) -> None:
    tiles = context.plan.tiles
    if tiles == 1:
        return
    forms = [(op.backward_op, op.tiled.backward_op) for op in OPS.values() if op.tiled is not None]
    backwards = {old.overload: (old, new) for old, new in forms if old is not None and new is not None}
    for node in list(graph.nodes):
        if (form := backwards.get(node.target)) is not None:
            made = _replacement(graph, node, *form, tiles)
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        op = OPS.get(node.target) if node.op == "call_function" else None
        if op is not None and op.tiled is not None and (first := _only_the_first(node)) is not None:
            made = _replacement(graph, node, op, op.tiled, tiles)
            made.meta = {**node.meta, "val": first.meta["val"]}
            first.replace_all_uses_with(made)
            graph.erase_node(first)
            graph.erase_node(node)
            if (_precisions(op) - _precisions(op.tiled)) & {*formats(context.precision)}:
                context.notes.append(
                    note("not-in-precision", context.region, note("tiled"), op=op.name, precision=context.precision)
                )


def _replacement(graph: Graph, node: Node, old: Op, new: Op, tiles: int) -> Node:
    """The tiled form's call; its arguments are those of the original call, by name."""
    known: dict[str, Any] = {**dict(zip(old.parameters, node.args)), "tiles": tiles}
    with graph.inserting_before(node):
        return graph.call_function(new.overload, tuple(known[name] for name in new.parameters))


def _only_the_first(node: Node) -> Node | None:
    """The call's first result, if no other has a user."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is operator.getitem and users[0].args[1] == 0 else None


def _precisions(op: Op) -> set[str | None]:
    return {provider.precision for provider in op.providers}


PASS = Pass("tile", "plan", run)
