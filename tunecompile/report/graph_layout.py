"""A layered layout of two graphs, with common boxes in the same place.

The four steps of Sugiyama, Tagawa and Toda (1981): assign a row to each box, a place in every row to each value that
passes it, order each row by the neighbours in other rows, and set coordinates near these neighbours. The second graph
starts with the coordinates of the first. (Of the libraries that do this, Graphviz and ELK are not Python, igraph is
under the GPL, and grandalf has had no release since 2023.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tunecompile.compiler.graph_snapshot import Box, GraphSnapshot

HEIGHT, PITCH, GAP, THREAD = 32, 50, 12, 8  #: pixels: height of a box, of a row, gap between boxes, passing value
LETTER, LEAST, MOST, NARROWEST = 6.6, 64, 168, 340  #: pixels of width: a letter; a box, min and max; a drawing, min
SWEEPS = 60
STRAIGHT, PINNED = 5.0, 50.0  #: weights, relative to a box, of passing values, and of boxes with a known place

Key = tuple[str, int]  #: (box, -1), or (box, row) for its value as it passes that row


@dataclass(frozen=True)
class Placed:
    """A box with its centre and its width, in pixels."""

    box: Box
    x: float
    y: float
    width: float
    replaces: tuple[str, ...] = ()  #: names of boxes of the first graph


@dataclass(frozen=True)
class Edge:
    """The SVG path of a value from the box that computes it to a box that reads it."""

    source: str
    target: str
    path: str


@dataclass(frozen=True)
class Drawing:
    """A graph with coordinates, in pixels. Two drawings of a pair share the origin; x may be negative."""

    boxes: tuple[Placed, ...]
    edges: tuple[Edge, ...]
    left: float
    width: float
    height: float


def side_by_side(before: GraphSnapshot, after: GraphSnapshot) -> tuple[Drawing, Drawing]:
    """Lay out both graphs. Unchanged boxes of `after` keep their places; an op takes that of the boxes it replaces."""
    replaces = replaced(before, after)
    rows = _late(before.boxes, _rows(before.boxes, {}))
    x = _coordinates(before.boxes, rows, {})
    known, hints = dict(rows), dict(x)
    for name, olds in replaces.items():
        if olds:
            known[name] = sorted(rows[old] for old in olds)[len(olds) // 2]
            hints[name, -1] = sum(x[old, -1] for old in olds) / len(olds)
    later = _rows(after.boxes, known)
    return _draw(before, rows, x, {}), _draw(after, later, _coordinates(after.boxes, later, hints), replaces)


def replaced(before: GraphSnapshot, after: GraphSnapshot) -> dict[str, tuple[str, ...]]:
    """For each new box of `after`, the boxes of `before` that it replaces.

    These are the removed boxes on the way from the values that the new box computes back to values that `after` has.
    """
    old, new = ({box.name: box for box in graph.boxes} for graph in (before, after))
    there = {name for box in after.boxes for name in (box.name, *box.gives)}
    found: dict[str, tuple[str, ...]] = {}
    for box in reversed(after.boxes):
        if box.name in old:
            continue
        pending, seen = [name for name in box.gives if name in old and name not in new], set()
        while pending:
            name = pending.pop()
            seen.add(name)
            pending += [n for n in old[name].inputs if n not in seen and n not in there]
        if not seen:  # several views of one result are behind it: take those of its readers
            seen = {name for user in after.boxes if box.name in user.inputs for name in found.get(user.name, ())}
        found[box.name] = tuple(name for name in old if name in seen and name not in new)
    return found


def _rows(boxes: Sequence[Box], known: Mapping[str, int]) -> dict[str, int]:
    """Put each box below all that it reads, and no higher than its known row."""
    rows: dict[str, int] = {}
    for box in boxes:
        rows[box.name] = max([rows[name] + 1 for name in box.inputs] + [known.get(box.name, 0)])
    return rows


def _late(boxes: Sequence[Box], rows: dict[str, int]) -> dict[str, int]:
    """Move boxes with more readers than inputs down to their readers, so that fewer lines are long."""
    rows, readers = dict(rows), defaultdict(list)
    for box in reversed(boxes):
        if (readers[box.name] and len(box.inputs) < len(readers[box.name])) or (not box.inputs and readers[box.name]):
            rows[box.name] = min(readers[box.name]) - 1
        for name in box.inputs:
            readers[name].append(rows[box.name])
    return rows


def _width(key: Key, boxes: Mapping[str, Box]) -> float:
    if key[1] >= 0:
        return THREAD
    box = boxes[key[0]]
    return min(MOST, max(LEAST, LETTER * max(len(box.label), 0.88 * len(box.shape)) + 18))


def _ways(boxes: Sequence[Box], rows: Mapping[str, int]) -> dict[str, list[Key]]:
    """For each value, its box and the rows that it passes on the way to its last reader."""
    last = {
        name: max(rows[box.name] for box in boxes if name in box.inputs)
        for name in {name for box in boxes for name in box.inputs}
    }
    return {
        box.name: [(box.name, -1), *((box.name, row) for row in range(rows[box.name] + 1, last.get(box.name, 0)))]
        for box in boxes
    }


def _coordinates(boxes: Sequence[Box], rows: Mapping[str, int], hints: Mapping[Key, float]) -> dict[Key, float]:
    """The x of the centre of every box and passing value, in pixels."""
    by_name, ways = {box.name: box for box in boxes}, _ways(boxes, rows)
    table: list[list[Key]] = [[] for _ in range(max(rows.values()) + 1)]
    joined: dict[Key, dict[int, list[Key]]] = defaultdict(lambda: {-1: [], 1: []})
    for box in boxes:
        for i, key in enumerate(ways[box.name]):
            table[rows[box.name] + i].append(key)
    links = [pair for way in ways.values() for pair in pairwise(way)]
    links += [(ways[name][rows[box.name] - rows[name] - 1], (box.name, -1)) for box in boxes for name in box.inputs]
    for upper, lower in links:
        joined[upper][1].append(lower)
        joined[lower][-1].append(upper)
    columns = _columns(table, joined)
    x = {key: hints.get(key, hints.get((key[0], -1), 120.0 * i)) for row in table for i, key in enumerate(row)}

    def wanted(key: Key, sides: tuple[int, ...], straight: bool) -> float:
        if key in hints:
            return hints[key]
        column = columns[key] if straight else [key]
        near = [x[n] for side in sides for n in joined[column[0 if side < 0 else -1]][side]] + [
            x[n] for n in column if len(column) > 1
        ]
        return sum(near) / len(near) if near else x[key]

    for sweep in range(SWEEPS):
        sides = (-1, 1) if hints or sweep > SWEEPS // 3 else (-1,) if sweep % 2 == 0 else (1,)
        for row in table if sweep % 2 == 0 else reversed(table):
            weights = {key: PINNED if key in hints else STRAIGHT if key[1] >= 0 else 1.0 for key in row}
            x.update(
                _settle(
                    {key: wanted(key, sides, sweep > SWEEPS // 3) for key in row},
                    {key: _width(key, by_name) for key in row},
                    weights,
                )
            )
    return x


def _columns(table: Sequence[Sequence[Key]], joined: Mapping[Key, Mapping[int, list[Key]]]) -> dict[Key, list[Key]]:
    """For each box or passing value, the others in its straight column: one value, without forks and joins between."""
    columns: dict[Key, list[Key]] = {}
    for key in (key for row in table for key in row):
        above = joined[key][-1]
        straight = len(above) == 1 and (len(joined[above[0]][1]) == 1 or (key[0] == above[0][0] and above[0][1] >= 0))
        columns[key] = columns[above[0]] if straight else []
        columns[key].append(key)
    return columns


def _settle(wanted: Mapping[Key, float], widths: Mapping[Key, float], weights: Mapping[Key, float]) -> dict[Key, float]:
    """Place keys as near to the wanted x as their widths allow.

    Least squares in the order of the wanted x: neighbours that would overlap move together.
    """
    order = sorted(wanted, key=wanted.__getitem__)
    offsets, at = {}, 0.0
    for left, right in zip([None, *order], order):
        at += (widths[left] + widths[right]) / 2 + GAP if left is not None else 0.0
        offsets[right] = at
    blocks: list[tuple[float, float, list[Key]]] = []  # mean, weight, members
    for key in order:
        mean, weight, members = wanted[key] - offsets[key], weights[key], [key]
        while blocks and blocks[-1][0] > mean:
            other, heavy, before = blocks.pop()
            mean, weight, members = (mean * weight + other * heavy) / (weight + heavy), weight + heavy, before + members
        blocks.append((mean, weight, members))
    return {key: mean + offsets[key] for mean, _, members in blocks for key in members}


def _draw(
    graph: GraphSnapshot, rows: Mapping[str, int], x: Mapping[Key, float], replaces: Mapping[str, tuple[str, ...]]
) -> Drawing:
    by_name = {box.name: box for box in graph.boxes}
    placed = tuple(
        Placed(
            box, x[box.name, -1], _middle(rows[box.name]), _width((box.name, -1), by_name), replaces.get(box.name, ())
        )
        for box in graph.boxes
    )
    edges = []
    for box in graph.boxes:
        for name in box.inputs:
            passed = [(x[name, row], row) for row in range(rows[name] + 1, rows[box.name])]
            edges.append(
                Edge(name, box.name, _path([(x[name, -1], rows[name]), *passed, (x[box.name, -1], rows[box.name])]))
            )
    left, right = (
        min(x[key] - _width(key, by_name) / 2 for key in x) - 2,
        max(x[key] + _width(key, by_name) / 2 for key in x) + 2,
    )
    spare = max(0.0, NARROWEST - (right - left))
    return Drawing(
        placed, tuple(edges), left - spare / 2, right - left + spare, _middle(max(rows.values())) + PITCH / 2
    )


def _middle(row: int) -> float:
    return PITCH * (row + 0.5)


def _path(points: Iterable[tuple[float, int]]) -> str:
    """An SVG path that is straight within rows and curved between them."""
    (x, row), *rest = points
    steps = [f"M{x:.1f} {_middle(row) + HEIGHT / 2:.1f}"]
    for nxt, row in rest:
        top = _middle(row) - HEIGHT / 2
        half = top - (PITCH - HEIGHT) / 2
        steps.append(f"C{x:.1f} {half:.1f} {nxt:.1f} {half:.1f} {nxt:.1f} {top:.1f}V{top + HEIGHT:.1f}")
        x = nxt
    return "".join(steps).rpartition("V")[0]
