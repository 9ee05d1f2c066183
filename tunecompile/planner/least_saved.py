"""Which element-wise results the backward recomputes, so that fewer bytes are saved for it.

The partitioner saves every result that a call of the backward reads from memory, such as the operand of a product, and
beside it what the result was computed of, where the backward needs that as well. Where both come from one value, that
value alone would do: the output of an MLP's first linear, for its activation and for the activation's derivative.

The values to save are those of a minimum cut between what has to be saved, if it is to be there (results of products,
of reductions and of random operations, inputs) and what the backward reads, each value at its bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from tunecompile._torch.autograd import CheckpointPolicy
from tunecompile.ir.op import aten_name
from tunecompile.ir.views import base_of, is_view
from tunecompile.planner.liveness import tensor_bytes

_MADE = ("full", "full_like", "zeros_like", "ones_like", "scalar_tensor", "arange", "iota")  #: read no memory
_REDUCTIONS = ("sum", "mean", "amax", "amin")  #: element-wise code is fused into them


def results_to_recompute(graph: Graph, backward: Collection[Node]) -> set[Node]:
    """Return the element-wise calls that the backward should run again, in a joint graph whose calls are tagged.

    Only those of which a result needs to be in memory in the backward: others are recomputed in registers, which the
    partitioner decides by itself. At equal bytes nothing is recomputed.

    Args:
        graph: a joint graph.
        backward: its nodes that depend on a tangent.
    """
    readers = {node for node in backward if node.op == "call_function"}
    needed = [node for node in graph.nodes if node not in backward and any(user in readers for user in node.users)]
    found = {node: cone for node in map(base_of, needed) if (cone := _cone(node)) and _reads_in_memory(node, readers)}
    if not found:
        return set()
    late = _late_side(needed)
    return {each for node, cone in found.items() if node in late for each in cone if each in late}


def _is_elementwise(node: Node) -> bool:
    """Whether it may be run again at the price of its memory traffic."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and (torch.Tag.pointwise in target.tags or aten_name(target) in ("_to_copy", "cat", *_MADE))
        and node.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE
    )


def _is_recomputed(node: Node) -> bool:
    """Whether it is recomputed wherever it is needed: views, and what is tagged so."""
    call = node.all_input_nodes[0] if node.target is getitem else node
    return is_view(node) or call.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


def _cone(node: Node) -> set[Node]:
    """An element-wise call with those that compute its value; empty if these alone make it of inputs, as of weights."""
    if not _is_elementwise(node) or not tensor_bytes(node.meta.get("val")):
        return set()
    cone, pending, computed = set(), [node], False
    while pending:
        each = pending.pop()
        if each in cone:
            continue
        if _is_elementwise(each) or _is_recomputed(each):
            cone.add(each)
            pending += each.all_input_nodes
            computed |= not _is_elementwise(each) and not is_view(each)  # an op, as a norm of the layer's input
        else:
            computed |= each.op == "call_function"
    return {each for each in cone if _is_elementwise(each)} if computed else set()


def _reads_in_memory(node: Node, backward: Collection[Node]) -> bool:
    """Whether a call of the backward that nothing fuses into reads it, by itself or through views."""
    for user in node.users:
        target: Any = user.target
        if is_view(user):
            if _reads_in_memory(user, backward):
                return True
        elif user in backward and user.op == "call_function":
            fused = torch.Tag.pointwise in getattr(target, "tags", ()) or aten_name(target) in (
                "_to_copy",
                *_REDUCTIONS,
            )
            if not fused:
                return True
    return False


def _late_side(needed: Collection[Node]) -> set[Node]:
    """The calls behind the cut: the backward computes them from what is saved. The fewest, at the fewest bytes."""
    import networkx  # comes with torch, whose partitioner cuts by it

    network, pending, seen = networkx.DiGraph(), list(needed), set(needed)
    for node in needed:
        network.add_edge((node, True), "read")
    while pending:
        node = pending.pop()
        again = _is_recomputed(node)
        if again:
            network.add_edge((node, False), (node, True))
        else:
            network.add_edge((node, False), (node, True), capacity=tensor_bytes(node.meta.get("val")))
        if not again and not _is_elementwise(node):
            network.add_edge("made", (node, False))
            continue
        for source in node.all_input_nodes:
            network.add_edge((source, True), (node, False))
            if source not in seen:
                seen.add(source)
                pending.append(source)
    _, (_, late) = networkx.minimum_cut(network, "made", "read")
    return {node for node in seen if (node, False) in late}
