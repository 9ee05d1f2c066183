"""Which calls of a joint graph work on experts' rows one by one: those run in tiles of rows.

Between the gather of tokens to rows, sorted by expert, and the sum of each token's rows every call gives a row by that
row alone: products with the matrix of its expert, activations, the routing weight. The same holds for the way back,
where adapters' gradients are sums over rows. Rows are the largest values of a long batch: as many as tokens have
experts, each as wide as gate|up.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from tunecompile.ir.op import OPS, Cost

aten, prims = torch.ops.aten, torch.ops.prims
GROUPED, GROUPED_BACKWARD = "grouped_lora_linear", "grouped_lora_linear_backward"
SPREADS = ("spread_rows", "collect_rows_backward")  #: tokens to rows
_ALONG: dict[Any, int] = {  #: ATen's calls that keep the rows, by where the dimensions stand that they work along
    aten.unsqueeze.default: 1,
    aten.squeeze.dim: 1,
    aten.sum.dim_IntList: 1,
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.cat.default: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}
_SAME = (aten.alias.default, aten.clone.default, prims.convert_element_type.default, aten._to_copy.default)


@dataclass
class ExpertRows:
    """The calls of one direction that give rows in one order."""

    order: Node  #: int64 [S]: the choice of each row
    nodes: list[Node] = field(default_factory=list)  #: in the graph's order
    rows: set[Node] = field(default_factory=set)  #: of these, those whose values have a row for each row
    beside: list[Node] = field(default_factory=list)  #: values of other calls that have, too: masks, and biases by row
    behind: set[Node] = field(default_factory=set)  #: other nodes that depend on them

    @property
    def products(self) -> list[Node]:
        return [node for node in self.nodes if name_of_op(node) in (GROUPED, GROUPED_BACKWARD)]


def expert_rows(graph: Graph, backward: set[Node]) -> list[ExpertRows]:
    """The calls on experts' rows, of both directions and each order, where a product is among them.

    Args:
        graph: joint.
        backward: its nodes that depend on a tangent.
    """
    found: dict[tuple[Node, bool], ExpertRows] = {}
    of: dict[Node, tuple[Node, bool]] = {}  # a call on rows -> the key of its ExpertRows
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        orders = {of[source][0] for source in node.all_input_nodes if source in of}
        orders |= {node.args[1]} if name_of_op(node) in SPREADS else set()
        key = (next(iter(orders)), node in backward) if len(orders) == 1 else None
        if key is not None:
            group = found.setdefault(key, ExpertRows(key[0]))
            known = {source for source in node.all_input_nodes if source in of and source in found[of[source]].rows}
            if not group.behind.intersection(node.all_input_nodes) and _is_by_row(node, known, key[0]):
                group.nodes.append(node)
                of[node] = key
                beside = [n for n in _tensors(node) if n not in known and _has_rows(n.meta["val"], key[0])]
                group.beside += [n for n in beside if n not in group.beside and name_of_op(node) not in SPREADS]
                if not isinstance(node.meta["val"], Tensor) or _has_rows(node.meta["val"], key[0]):
                    group.rows.add(node)
                continue
        for group in found.values():
            if any(
                (of.get(s) is not None and found[of[s]] is group) or s in group.behind for s in node.all_input_nodes
            ):
                group.behind.add(node)
    return [group for group in found.values() if group.products]


def name_of_op(node: Node) -> str | None:
    """The name of the op that a node calls; None of another call."""
    return OPS[node.target].name if node.target in OPS else None


def sums_over_rows(node: Node) -> bool:
    """Whether it is one of the gradients that a product's backward sums over all rows."""
    of: Any = node.args
    return node.target is operator.getitem and name_of_op(of[0]) == GROUPED_BACKWARD and of[1] > 0


def _is_by_row(node: Node, rows: set[Node], order: Node) -> bool:
    """Whether a call gives each row by that row of some of its inputs, and by nothing else of theirs.

    Args:
        node: the call.
        rows: of its inputs, those that have rows.
        order: of the rows.
    """
    given: Any = node.args
    if name_of_op(node) in SPREADS:
        return not rows
    if node.target is operator.getitem:
        return sums_over_rows(node) or _has_rows(node.meta["val"], order)
    if name_of_op(node) == GROUPED:
        return rows == {given[0]}
    if name_of_op(node) == GROUPED_BACKWARD:
        grad, x, *_, xa = given
        return rows == {grad, x, xa} and all(_is_exact(user) for user in node.users if sums_over_rows(user))
    if not rows:
        return False
    if node.target in OPS:
        return OPS[node.target].cost is Cost.POINTWISE and rows == {*_tensors(node)} and _all_have_rows(node, order)
    if (at := _ALONG.get(node.target)) is not None:
        return rows == {*_tensors(node)} and _all_have_rows(node, order) and _leaves_rows(node, at)
    tags = getattr(node.target, "tags", ())
    return (
        (node.target in _SAME or torch.Tag.pointwise in tags)
        and _has_rows(node.meta["val"], order)
        and torch.Tag.nondeterministic_seeded not in tags
        and all(_is_beside(source, node, order) for source in _tensors(node))
    )


def _is_exact(gradient: Node) -> bool:
    """Whether partial sums of a gradient lose nothing: rounded ones would be farther off than a whole one."""
    return not gradient.users or gradient.meta["val"].dtype in (torch.float32, torch.float64)


def _is_beside(source: Node, node: Node, order: Node) -> bool:
    """Whether an element-wise call reads of an input either the same row or what all rows share."""
    value, made = source.meta["val"], node.meta["val"]
    if value.dim() < made.dim():
        return not _has_rows(value, order)
    return _has_rows(value, order) or str(value.shape[0]) == "1"


def _leaves_rows(node: Node, at: int) -> bool:
    """Whether the dimensions that a call works along are not that of the rows."""
    given = node.args[at] if len(node.args) > at else 0
    dims, count = (given if isinstance(given, (list, tuple)) else [given]), _tensors(node)[0].meta["val"].dim()
    count += node.target is aten.unsqueeze.default
    return bool(dims) and all(dim % count != 0 for dim in dims)


def _has_rows(value: Any, order: Node) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and str(value.shape[0]) == str(order.meta["val"].shape[0])


def _all_have_rows(node: Node, order: Node) -> bool:
    made = node.meta["val"]
    return all(
        _has_rows(value, order) for value in (made if isinstance(made, Sequence) else [made]) if value is not None
    )


def _tensors(node: Node) -> list[Node]:
    return [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
