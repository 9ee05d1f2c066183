"""Save what is dear to compute, recompute what is cheap, and what the layer's plan names; under checkpointing, all that draws no random numbers.

Tags only: the partitioner (min-cut) decides within them. A value tagged to be saved is saved only if the backward needs it, so
a product whose result nobody reads again costs no memory.
"""

import operator

import torch
from torch.fx import Graph, Node

from tunecompile._torch.autograd import CheckpointPolicy
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import Cost, returns_view
from tunecompile.planner.candidates import backward_nodes, communicates, expensive_nodes, is_random
from tunecompile.planner.cost_model import node_cost
from tunecompile.planner.liveness import tensor_bytes

__all__ = ["PASS"]

SMALL = (
    1 / 16
)  #: of all a call returns: results (an adapter's XA, a softmax's sums) that stay saved though the call is repeated


def run(graph: Graph, context: Context) -> None:
    backward, dear, plan = backward_nodes(graph), expensive_nodes(graph), context.plan
    again = set(dear if plan.recompute is None else [node for i, node in enumerate(dear) if i in plan.recompute])
    for node in graph.nodes:
        if node.op != "call_function" or node in backward:
            continue
        if node.target is operator.getitem:
            policy = node.args[0].meta.get("recompute")
            if plan.recompute is not None and node.args[0] in again and _is_small(node):
                node.meta["pinned"] = (
                    True  # the partitioner never asks what a member of a result is tagged with: see `partition`
                )
        elif is_random(node) or communicates(
            node
        ):  # its numbers would have to be drawn again from the same state, or all ranks would have to send again
            policy = CheckpointPolicy.MUST_SAVE
        elif again and (node in again or node_cost(node) is not Cost.MATMUL):
            policy = (
                CheckpointPolicy.MUST_RECOMPUTE
            )  # also what is fused: min-cut would save it in place of the product it is made of
        else:
            policy = _POLICY.get(node_cost(node))
        if policy is not None:
            node.meta["recompute"], node.meta["ac_graph_id"] = policy, 0
    written = _written(graph)
    for node in _views_of_inputs(graph, written, backward):
        node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, 0
    for place in written:
        for reader in _readers(place, backward):
            reader.meta["recompute"], reader.meta["ac_graph_id"] = CheckpointPolicy.MUST_SAVE, 0


def _views_of_inputs(graph: Graph, written: set[Node], backward: set[Node]) -> list[Node]:
    """The input itself is saved in place of these. Of a weight that DeepSpeed frees and gathers again in the backward pass, a view would keep the first one.

    (Not of what is written to: the backward would find another value there.)"""
    sources, found = set(graph.find_nodes(op="placeholder")) - written, []
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node not in backward
            and returns_view(node.target)
            and isinstance(node.args[0], Node)
            and node.args[0] in sources
        ):
            sources.add(node)
            found.append(node)
    return found


def _written(graph: Graph) -> set[Node]:
    """Inputs that the forward writes to: in the graph, or behind it, where AOTAutograd copies what the graph returns into them."""
    inside = {node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    behind = [
        into
        for made in graph.output_node().meta.get("desc") or ()
        if (into := getattr(made, "mutated_input", None)) is not None
    ]
    return {
        place for place in graph.find_nodes(op="placeholder") if place in inside or place.meta.get("desc") in behind
    }


def _readers(written: Node, backward: set[Node]) -> list[Node]:
    """What the forward makes of a buffer that it then writes to: the backward would find another value there."""
    found, pending = [], [user for user in written.users if user not in backward]
    while pending:
        user = pending.pop()
        if returns_view(user.target):
            pending += [reader for reader in user.users if reader not in backward]
        elif user.op == "call_function" and user.target is not torch.ops.aten.copy_.default:
            found.append(user)
    return found


def _is_small(member: Node) -> bool:
    value = member.args[0].meta["val"]
    return isinstance(value, (tuple, list)) and 0 < tensor_bytes(member.meta.get("val")) <= SMALL * sum(
        map(tensor_bytes, value)
    )


_POLICY = {Cost.POINTWISE: CheckpointPolicy.MUST_RECOMPUTE, Cost.MATMUL: CheckpointPolicy.MUST_SAVE}

PASS = Pass("remat", "plan", run)
