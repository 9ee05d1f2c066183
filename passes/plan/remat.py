"""Save what is dear to compute, recompute what is cheap; under checkpointing, recompute all that draws no random numbers.

Tags only: the partitioner (min-cut) decides within them. A value tagged to be saved is saved only if the backward needs it, so
a product whose result nobody reads again costs no memory.
"""

import operator

import torch
from torch.fx import Graph, Node

from tunecompile._torch import CheckpointPolicy
from tunecompile.op import OPS, Cost
from tunecompile.pipeline import Context, Pass

_DEAR = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm")


def backward_nodes(graph: Graph) -> set[Node]:
    """Everything that depends on a tangent."""
    reached: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def _cost(node: Node) -> Cost | None:
    """Of an op, or of an ATen call; None where the partitioner knows best."""
    if node.target in OPS:
        return OPS[node.target].cost
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name in _DEAR or ("attention" in name and "backward" not in name):
        return Cost.MATMUL
    return None


def _random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def run(graph: Graph, context: Context) -> None:
    backward = backward_nodes(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node in backward:
            continue
        if node.target is operator.getitem:
            policy = node.args[0].meta.get("recompute")
        elif _random(node):  # its numbers would have to be drawn again from the same state
            policy = CheckpointPolicy.MUST_SAVE
        elif context.checkpoint:
            policy = CheckpointPolicy.MUST_RECOMPUTE
        else:
            cost = _cost(node)
            policy = None if cost is None else _POLICY[cost]
        if policy is not None:
            node.meta["recompute"], node.meta["ac_graph_id"] = policy, 0


_POLICY = {Cost.POINTWISE: CheckpointPolicy.MUST_RECOMPUTE, Cost.MATMUL: CheckpointPolicy.MUST_SAVE}

PASS = Pass("remat", "plan", run)
