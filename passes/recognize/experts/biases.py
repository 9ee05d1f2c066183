"""Biases of experts, which are added to each row of a grouped product, become part of the product.

Models gather a row of biases for each row (`integrations/moe.py` of transformers), by the id of its expert. The graph
must show that these ids are those that the offsets count. In rows of no expert our product is 0, without a bias.
torch's leaves them unwritten, so no model reads them.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.nodes import DISTURBED, is_disturbed, is_mutation
from tunecompile.ir.rewrite import erase_dead
from tunecompile.ops import grouped_lora_linear
from tunecompile.passes.recognize.experts.ids import asked, counted, source

__all__ = ["PASS"]

_ADDS = (operator.add, torch.add, operator.iadd, "add", "add_")
_BIAS = grouped_lora_linear.parameters.index("bias")


def _added(rows: Node) -> tuple[Node, Node] | None:
    """(The first call that adds something to a product's rows, what it adds)."""
    for user in rows.users:
        if user.op in ("call_function", "call_method") and user.target in _ADDS:
            sides = [side for side in user.args if side is not rows]
            in_order = user.target not in ("add", "add_", operator.iadd) or user.args[0] is rows
            if len(user.args) == 2 and not user.kwargs and len(sides) == 1 and in_order and isinstance(sides[0], Node):
                return user, sides[0]
    return None


def _is_choice(ids: Node) -> bool:
    """Whether sorted ids come from a top-k, so that none is negative."""
    sort = ids.args[0]
    made = source(sort, torch.sort, "sort")
    while (shaped := source(made, "view", "reshape", torch.reshape, "flatten", torch.flatten)) is not None:
        made = shaped
    chosen = source(made, operator.getitem)
    return chosen is not None and made.args[1] == 1 and chosen.target in (torch.topk, "topk")


def _refusal(product: Node, rows: Node, add: Node, biases: Node) -> str | None:
    weight, offsets = product.args[1:3]
    stack, ids = biases.args
    experts, columns = value(weight).shape[0], value(rows).shape[1]
    if not isinstance(ids, Node) or tuple(value(stack).shape) != (experts, columns):
        return "what is added is no bias of an expert"
    if counted(offsets) is not ids or not _is_choice(ids):
        return "its biases are chosen by other ids than its matrices"
    # such a clamp only changes ids of no expert
    clamps = [asked(user, "min", "max") if user.target == "clamp_" else None for user in ids.users if is_mutation(user)]
    if any(clamp not in ([None, experts - 1], [0, experts - 1]) for clamp in clamps):
        return "the ids are changed"
    if is_disturbed(product, add, whole_numbers=False):
        return DISTURBED
    if dtype_of(add) != dtype_of(rows):
        return f"the sum is {dtype_of(add)}"
    order = {node: place for place, node in enumerate(product.graph.nodes)}
    others = [user for user in rows.users if user is not add]
    if any(not is_mutation(add) or order[user] < order[add] for user in others):
        return "the product is read without its bias, too"
    if any(is_mutation(user) and user.args[0] is stack for user in stack.users) or order[stack] > order[product]:
        return "its biases are made or changed behind it"
    return None


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("expert_biases")
    for product in [node for node in graph.nodes if node.target is grouped_lora_linear.overload]:
        rows = next((user for user in product.users if user.target is operator.getitem and user.args[1] == 0), None)
        found = None if rows is None or product.args[_BIAS] is not None else _added(rows)
        if found is None:
            continue
        add, biases = found
        if source(biases, operator.getitem) is None:
            continue
        if tally.judge(_refusal(product, rows, add, biases), add, "biases of experts"):
            product.update_arg(_BIAS, biases.args[0])
            add.replace_all_uses_with(rows)
            graph.erase_node(add)
            erase_dead(graph, [biases])


PASS = Pass("expert_biases", "recognize", run, requires=frozenset({"experts"}))
