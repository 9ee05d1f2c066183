"""A gated activation whose rows are weighted becomes one op: one pass computes the gradients of gate, up and weights.

Routing weights stand before an expert's second product (`tunecompile.passes.recognize.experts.products`).
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.nodes import DISTURBED, is_disturbed
from tunecompile.ir.rewrite import erase_dead, replace
from tunecompile.ops import gated_activation, weighted_gate

__all__ = ["PASS"]


def _weighted(gated: Node) -> tuple[Node, Node] | None:
    """(The product of a gated activation with a weight for each row, the weights), if nothing else reads it."""
    if len(gated.users) != 1 or value(gated).dim() != 2:
        return None
    (product,) = gated.users
    if product.target is not operator.mul or len(product.args) != 2 or product.kwargs:
        return None
    weights = product.args[product.args[0] is gated]
    shape = getattr(value(weights), "shape", None) if isinstance(weights, Node) else None
    rows = shape is not None and tuple(shape) == (value(gated).shape[0], 1)
    return (product, weights) if rows and value(weights).is_floating_point() else None


def _rounded(product: Node, dtype: torch.dtype) -> Node | None:
    """The product in a dtype: itself, or the cast that alone reads it."""
    if dtype_of(product) == dtype:
        return product
    casts = [user for user in product.users if user.target == "to" and user.args[1:] == (dtype,) and not user.kwargs]
    return casts[0] if len(casts) == len(product.users) == 1 else None


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("weighted_gate")
    for gated in [node for node in graph.nodes if node.target is gated_activation.overload]:
        if (found := _weighted(gated)) is None:
            continue
        product, weights = found
        gate, up, activation = gated.args
        last = _rounded(product, dtype_of(gated))
        bound = {"gate": gate, "up": up, "weights": weights, "activation": activation}
        if last is None:
            reason: str | None = "the product is in another dtype"
        elif is_disturbed(gated, last, whole_numbers=False):
            reason = DISTURBED
        else:
            reason = replace(graph, (last,), weighted_gate, bound)
        if tally.judge(reason, product, "weighted gate"):
            erase_dead(graph, [node for node in (last, product, gated) if node is not None])


PASS = Pass("weighted_gate", "recognize", run, requires=frozenset({"swiglu"}))
