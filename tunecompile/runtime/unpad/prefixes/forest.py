"""Rows that begin alike, as a forest in which each common prefix stands once. Pure, from what tokens are known by.

Rows become a radix tree: a node holds tokens that all rows through it share, and branches where they differ. (SGLang
keeps caches in such a tree: arXiv:2312.07104.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SHORTEST = 32  #: tokens of a shared node, at least: each node is a further loop of attention's kernels
GAIN = 1.15  #: how many times as many tokens rows have as the forest, from which it pays


@dataclass(frozen=True)
class Forest:
    """Documents that go on where others end, depth first: all that is below a document follows it."""

    starts: list[int]  #: [S + 1], where each document begins among the N tokens
    parents: list[int]  #: [S], -1 for none
    ends: list[int]  #: [S], where the last token below a document ends
    depths: list[int]  #: [S], the place in its row of a document's first token
    begins: list[int]  #: [rows + 1], where each row begins among the R
    tokens: Tensor  #: int64 [R], for each token of the rows, its place among the N
    copies: Tensor  #: int64 [R], how many rows before it have this token as well
    count: int  #: N

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(end - begin for begin, end in itertools.pairwise(self.starts))


@dataclass(eq=False)
class _Node:
    """Tokens of a row from `begin` to `end`, which others go through."""

    row: int
    begin: int
    end: int
    through: list[int]  #: the rows that have these tokens
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)  #: by what their first token is known by


def forest_of(keys: Tensor, lengths: Sequence[int], shortest: int = SHORTEST, gain: float = GAIN) -> Forest | None:
    """The forest of rows.

    Args:
        keys: int64 [K, R], on the host: what each token is known by, its id, say; rows one behind the other. Tokens at
            the same place of two rows are the same where these and all before them are equal.
        lengths: of the rows, R in all.
        shortest: tokens that at least two rows have to share for a document of their own.
        gain: see `GAIN`.

    Returns:
        None where it does not pay.
    """
    begins = [0, *itertools.accumulate(lengths)]
    rows = [keys[:, begin:end] for begin, end in itertools.pairwise(begins)]
    root = _Node(0, 0, 0, [])
    for row in range(len(rows)):
        _insert(root, row, rows)
    placed = [(node, parent) for top in root.children.values() for node, parent in _nodes(top, shortest)]
    count = sum(node.end - node.begin for node, _ in placed)
    if begins[-1] < gain * count:
        return None
    return _laid_out(placed, begins, count)


def _insert(root: _Node, row: int, rows: Sequence[Tensor]) -> None:
    keys, at, above = rows[row], 0, root
    while at < keys.shape[1]:
        first = tuple(keys[:, at].tolist())
        node = above.children.get(first)
        if node is None:
            above.children[first] = _Node(row, at, keys.shape[1], [row])
            return
        shared = _alike(rows[node.row][:, at : node.end], keys[:, at:])
        if at + shared < node.end:
            node = above.children[first] = _split(node, at + shared, rows[node.row])
        node.through.append(row)
        at, above = at + shared, node


def _alike(a: Tensor, b: Tensor) -> int:
    """How many tokens are equal, from the first on."""
    length = min(a.shape[1], b.shape[1])
    differ = (a[:, :length] != b[:, :length]).any(0)
    return int(differ.to(torch.uint8).argmax()) if differ.any() else length


def _split(node: _Node, at: int, keys: Tensor) -> _Node:
    """A node that ends at this place, with what is left of `node` below it."""
    upper = _Node(node.row, node.begin, at, list(node.through))
    node.begin = at
    upper.children[tuple(keys[:, at].tolist())] = node
    return upper


def _nodes(top: _Node, shortest: int) -> Iterator[tuple[_Node, _Node | None]]:
    """(node, its parent), depth first. A node that is too short stands in each of its children instead."""
    waiting: list[tuple[_Node, _Node | None]] = [(top, None)]
    while waiting:
        node, parent = waiting.pop()
        if node.children and node.end - node.begin < shortest:
            ended = set(node.through).difference(*(child.through for child in node.children.values()))
            below = [
                _Node(child.row, node.begin, child.end, child.through, child.children)
                for child in node.children.values()
            ]
            below += [_Node(min(ended), node.begin, node.end, sorted(ended))] if ended else []
            waiting += [(child, parent) for child in reversed(below)]
            continue
        yield node, parent
        waiting += [(child, node) for child in reversed(node.children.values())]


def _laid_out(placed: list[tuple[_Node, _Node | None]], begins: list[int], count: int) -> Forest:
    starts = [0, *itertools.accumulate(node.end - node.begin for node, _ in placed)]
    numbers = {node: number for number, (node, _) in enumerate(placed)}
    parents = [-1 if parent is None else numbers[parent] for _, parent in placed]
    ends = starts[1:]
    for number in reversed(range(len(placed))):
        if parents[number] >= 0:
            ends[parents[number]] = max(ends[parents[number]], ends[number])
    tokens, copies = (torch.empty(begins[-1], dtype=torch.int64, device="cpu") for _ in range(2))
    for start, (node, _) in zip(starts, placed):
        places = torch.arange(start, start + node.end - node.begin, device="cpu")
        for copy, row in enumerate(node.through):
            there = slice(begins[row] + node.begin, begins[row] + node.end)
            tokens[there], copies[there] = places, copy
    return Forest(starts, parents, ends, [node.begin for node, _ in placed], begins, tokens, copies, count)
