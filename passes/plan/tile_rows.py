"""Tile over experts' rows where the layer's plan says so: one tile's products and activations after another's.

Rows are sorted by expert, so a tile of them reads few experts' matrices. What a tile's way back needs of the way there
is recomputed for its own rows alone. Of all rows together only what experts give exists, and its gradient. (Tiles over
tokens, arXiv:2506.13996, of the sorted rows of arXiv:2211.15841.)"""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg
from torch.utils._pytree import tree_map_only

from tunecompile._torch.fake_tensors import fake_mode_of, trace, tracing
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import OPS
from tunecompile.planner.candidates import backward_nodes, expensive_nodes
from tunecompile.planner.expert_rows import (
    GROUPED,
    GROUPED_BACKWARD,
    SPREADS,
    ExpertRows,
    expert_rows,
    name_of_op,
    sums_over_rows,
)

__all__ = ["PASS"]

aten = torch.ops.aten
OFFSETS = {op.overload: op.parameters.index("offsets") for op in OPS.values() if op.name in (GROUPED, GROUPED_BACKWARD)}


def run(graph: Graph, context: Context) -> None:
    tiles = context.plan.tiles
    if tiles == 1:
        return
    groups = [
        group
        for group in expert_rows(graph, backward_nodes(graph))
        if group.order.meta["val"].shape[0] >= 2 * tiles  # torch asks of each size whether it is 1, and compiles anew
    ]
    if not groups:
        return
    for at, node in enumerate(expensive_nodes(graph)):
        node.meta["expensive"] = at  # a plan names them as they were
    places: dict[Node, tuple[int, ...]] = {node: (at,) for at, node in enumerate(graph.nodes)}
    tiled: dict[tuple[Node, int], Node] = {}
    members = {node for group in groups for node in group.nodes}
    for group in groups:
        _tile(graph, group, tiles, tiled, places)
        _join(graph, group, tiles, tiled, members)
    for node in sorted(members, key=places.__getitem__, reverse=True):
        graph.erase_node(node)
    _sort(graph, places)


def _tile(
    graph: Graph,
    group: ExpertRows,
    tiles: int,
    tiled: dict[tuple[Node, int], Node],
    places: dict[Node, tuple[int, ...]],
) -> None:
    """Add each call once a tile. tiled: (call, tile) -> its copy; places: where nodes belong in the graph's order."""
    offsets = list(dict.fromkeys(node.args[OFFSETS[node.target]] for node in group.products))
    pieces, ends = _cut(graph, [group.order, *group.beside], offsets, tiles)
    tiled |= {(node, tile): piece for node in group.beside for tile, piece in enumerate(pieces[node])}
    end, mode = places[group.nodes[-1]], fake_mode_of(group.order.meta["val"])
    for tile in range(tiles):
        for at, node in enumerate(group.nodes):
            made = graph.node_copy(node, lambda source, tile=tile: tiled.get((source, tile), source))
            if name_of_op(node) in SPREADS:
                made.update_arg(1, pieces[group.order][tile])
            elif (position := OFFSETS.get(node.target)) is not None:
                made.update_arg(position, ends[node.args[position]][tile])
            with tracing(mode):
                if node.target in OPS and 0 < tile < tiles - 1:  # as large as the first tile's, and quicker made
                    made.meta["val"] = tree_map_only(Tensor, torch.empty_like, tiled[node, 0].meta["val"])
                else:
                    made.meta["val"] = made.target(*map_arg(made.args, _value), **map_arg(made.kwargs, _value))
            made.meta["tile"] = tile
            tiled[node, tile], places[made] = made, (*end, tile, at)


def _cut(
    graph: Graph, rows: list[Node], offsets: list[Node], tiles: int
) -> tuple[dict[Node, list[Node]], dict[Node, list[Node]]]:
    """The rows of each tile, and where experts end in it."""

    def cut(*values: Tensor) -> list[Tensor]:
        count = values[0].shape[0]
        sizes = [count // tiles] * (tiles - 1)
        sizes.append(count - sum(sizes))
        found = [piece for value in values[: len(rows)] for piece in value.split(sizes)]
        for behind in values[len(rows) :]:
            for size in sizes:
                length = torch.full_like(behind, size)
                found.append(torch.minimum(behind.clamp(min=0), length))
                behind = behind - length
        return found

    nodes = [*rows, *offsets]
    values = tuple(node.meta["val"] for node in nodes)
    traced = trace(cut, values, fake_mode_of(values)).graph
    found: Any = graph.graph_copy(traced, dict(zip(traced.find_nodes(op="placeholder"), nodes)))
    pieces = [list(found[at : at + tiles]) for at in range(0, len(found), tiles)]
    return dict(zip(rows, pieces)), dict(zip(offsets, pieces[len(rows) :]))


def _join(graph: Graph, group: ExpertRows, tiles: int, tiled: dict[tuple[Node, int], Node], members: set[Node]) -> None:
    """Give other calls the rows of all tiles, and the sums over them."""
    for node in group.nodes:
        if all(user in members for user in node.users):
            continue
        parts = [tiled[node, tile] for tile in range(tiles)]
        if sums_over_rows(node):
            joined = parts[0]
            for part in parts[1:]:
                joined = graph.call_function(aten.add.Tensor, (joined, part))
                joined.meta["val"] = torch.empty_like(node.meta["val"])
        else:
            joined = graph.call_function(aten.cat.default, (parts,))
            joined.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(joined, delete_user_cb=lambda user: user not in members)


def _value(node: Node) -> object:
    return node.meta["val"]


def _sort(graph: Graph, places: dict[Node, tuple[int, ...]]) -> None:
    """Order the graph: what has a place comes there, or as soon as its inputs are there, and what has none at once."""

    def place(node: Node) -> tuple[int, ...]:
        return (-2, *places[node]) if node.op == "placeholder" else places.get(node, (-1,))

    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(place(node), at, node) for at, node in enumerate(graph.nodes) if not missing[node]]
    heapq.heapify(ready)
    count, last = len(missing), None
    while ready:
        *_, node = heapq.heappop(ready)
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                count += 1
                heapq.heappush(ready, (place(user), count, user))


PASS = Pass("tile_rows", "plan", run)
