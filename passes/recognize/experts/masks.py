"""Masks over rows of experts on other ranks are removed: grouped products give 0 there without them.

transformers sets such rows to 0 before and after each product, also on a single rank (`integrations/moe.py`), because a
grouped product leaves them unwritten. `grouped_lora_linear` writes zeros, and a mask would prevent it from reading rows
in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.nodes import is_disturbed, is_mutation
from tunecompile.ir.rewrite import erase_dead, where_from
from tunecompile.ops import grouped_lora_linear
from tunecompile.passes.recognize.experts.ids import asked, counted, source

__all__ = ["PASS"]

_IN_PLACE = "masked_fill_"
_FILLS = ("masked_fill", torch.masked_fill, _IN_PLACE)


def _of_nobody(mask: object, offsets: Node) -> bool:
    """Whether a mask covers only rows behind the last offset.

    Ids are in increasing order, and the last offset is the number of ids below E: the other ids are behind it.
    """
    compared = source(mask, "unsqueeze", torch.unsqueeze)
    ids = source(compared, operator.ge, torch.ge, "ge")
    if ids is None or compared.args[1:] != (value(offsets).shape[0],) or asked(mask, "dim")[0] not in (-1, 1):
        return False
    changed = [user for user in ids.users if is_mutation(user)]
    order = {node: place for place, node in enumerate(ids.graph.nodes)}
    first = min((order[user] for user in changed), default=len(order))
    return counted(offsets) is ids and all(order[node] < first for node in (compared, *_between(ids, offsets)))


def _between(ids: Node, offsets: Node) -> Iterator[Node]:
    """The calls that compute offsets from ids."""
    node = offsets
    while node is not ids:
        yield node
        node = node.args[0]


def _fills(node: Node, offsets: Node) -> bool:
    """Whether a call sets rows of no expert to 0, and does nothing else."""
    if node.op == "output" or node.target not in _FILLS:
        return False
    mask, filled = asked(node, "mask", "value")
    return filled == 0 and isinstance(mask, Node) and _of_nobody(mask, offsets)


def _before(product: Node, offsets: Node) -> Node | None:
    """The mask over a product's input, if only products by the same experts read the masked input."""
    x = product.args[0]
    if _fills(x, offsets) and x.target != _IN_PLACE:
        return x if all(_leaves_out(user, x, offsets) for user in x.users) else None
    for user in x.users:
        if user.target == _IN_PLACE and user.args[0] is x and _fills(user, offsets):
            return user if set(x.users) == {user, product} and not user.users else None
    return None


def _leaves_out(user: Node, rows: Node, offsets: Node) -> bool:
    """Whether a reader of masked rows gives the same of those before the mask."""
    is_product = user.target is grouped_lora_linear.overload and (user.args[0], user.args[2]) == (rows, offsets)
    return is_product and not is_disturbed(rows, user, whole_numbers=False)


def _behind(product: Node, offsets: Node) -> Iterator[Node]:
    """Masks over a product's result, which is already 0 there."""
    for made in product.users:
        rows = made.target is operator.getitem and made.args[1] == 0
        if rows and not any(is_mutation(user) for user in made.users):
            yield from (user for user in made.users if _fills(user, offsets) and user.args[0] is made)


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("expert_masks")
    for product in [node for node in graph.nodes if node.target is grouped_lora_linear.overload]:
        offsets = product.args[2]
        for mask in [*filter(None, [_before(product, offsets)]), *_behind(product, offsets)]:
            tally.rewrote(f"rows of nobody{where_from(mask)}")
            if mask.target != _IN_PLACE:
                assert dtype_of(mask) == dtype_of(mask.args[0])
                mask.replace_all_uses_with(mask.args[0])
            compared = asked(mask, "mask")[0]
            graph.erase_node(mask)
            erase_dead(graph, [compared, *compared.all_input_nodes])


PASS = Pass("expert_masks", "recognize", run)
