"""Rematerialization: tag which values the backward recomputes: cheap ones, and those that the layer's plan names.

Tags only: the partitioner (min-cut) decides within them. A value tagged to be saved is saved only if the backward
needs it, so a product without a user in the backward costs no memory.
"""

import operator

import torch
from torch.fx import Graph, Node

from tunecompile._torch.autograd import CheckpointPolicy
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import Cost, returns_view
from tunecompile.planner.candidates import backward_nodes, communicates, expensive_nodes, is_random
from tunecompile.planner.cost_model import node_cost
from tunecompile.planner.least_saved import results_to_recompute
from tunecompile.planner.liveness import tensor_bytes

__all__ = ["PASS"]

#: a result (an adapter's XA, a softmax's sums) of at most this share of a recomputed call's results stays saved
SMALL = 1 / 16


def run(graph: Graph, context: Context) -> None:
    backward, expensive, plan = backward_nodes(graph), expensive_nodes(graph), context.plan
    named = {node: node.meta.get("expensive", at) for at, node in enumerate(expensive)}
    recomputed = {n for n, at in named.items() if plan.recompute is None or at in plan.recompute or "tile" in n.meta}
    _tag_calls(graph, backward, recomputed, names=plan.recompute is not None)
    written = _written(graph)
    for node in _views_of_inputs(graph, written, backward):
        _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    for node in _written_out(graph, written, backward):
        _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    for place in written:
        for reader in _readers(place, backward):
            _tag(reader, CheckpointPolicy.MUST_SAVE)
    if not recomputed:  # else all element-wise calls are
        for node in results_to_recompute(graph, backward):
            _tag(node, CheckpointPolicy.MUST_RECOMPUTE)


def _tag_calls(graph: Graph, backward: set[Node], recomputed: set[Node], names: bool) -> None:
    """Tag each call of the forward by itself. `names`: whether the plan names those that are recomputed."""
    for node in graph.nodes:
        if node.op != "call_function" or node in backward:
            continue
        if node.target is operator.getitem:
            policy = node.args[0].meta.get("recompute")
            if names and node.args[0] in recomputed and "tile" not in node.meta and _is_small(node):
                node.meta["pinned"] = True  # the partitioner ignores tags of a tuple's members: see `partition`
        else:
            policy = _policy(node, recomputed)
            if policy is None and _extends_recomputed(node):
                policy = CheckpointPolicy.MUST_RECOMPUTE
        if policy is not None:
            _tag(node, policy)


def _policy(node: Node, recomputed: set[Node]) -> CheckpointPolicy | None:
    if is_random(node) or communicates(node):  # a second run would need the same RNG state, or all ranks to send again
        return CheckpointPolicy.MUST_SAVE
    if _is_all_of_random(node):
        return CheckpointPolicy.MUST_SAVE
    cost = node_cost(node)
    if recomputed and (node in recomputed or cost is not Cost.MATMUL):
        return CheckpointPolicy.MUST_RECOMPUTE  # pointwise ones, too: min-cut would save them in place of their product
    return None if cost is None else _POLICY.get(cost)


def _is_all_of_random(node: Node) -> bool:
    """Whether it is computed of random numbers that nothing else reads, and smaller: dropout's mask, of bools."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) or len(node.all_input_nodes) != 1:
        return False
    (drawn,) = node.all_input_nodes
    smaller = tensor_bytes(node.meta.get("val")) < tensor_bytes(drawn.meta.get("val"))
    return is_random(drawn) and len(drawn.users) == 1 and smaller


def _extends_recomputed(node: Node) -> bool:
    """Whether it is elementwise, of one value that is recomputed anyway, and beside it only of small ones.

    Min-cut may save it, as large as what was recomputed to save memory: rows of experts behind a mask, say.
    """
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    size, own = tensor_bytes(node.meta.get("val")), CheckpointPolicy.MUST_RECOMPUTE
    large = [each for each in node.all_input_nodes if tensor_bytes(each.meta.get("val")) > SMALL * size]
    return bool(size) and len(large) == 1 and large[0].op == "call_function" and large[0].meta.get("recompute") is own


def _tag(node: Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"], node.meta["ac_graph_id"] = policy, 0


def _views_of_inputs(graph: Graph, written: set[Node], backward: set[Node]) -> list[Node]:
    """Views of inputs: the input itself is saved in their place.

    A saved view would keep the first copy of a weight that DeepSpeed frees, and gathers once more in the backward pass.
    Inputs that are written to are left out: the backward would read another value.
    """
    sources, found = set(graph.find_nodes(op="placeholder")) - written, []
    for node in graph.nodes:
        if node not in backward and returns_view(node.target) and node.args[0] in sources:
            sources.add(node)
            found.append(node)
    return found


def _written_out(graph: Graph, written: set[Node], backward: set[Node]) -> list[Node]:
    """Numbers in place of an input of bools: a mask, as attention adds it to scores.

    Min-cut saves them in each layer, twice or four times as large as the mask, which all layers share.
    """
    inputs = set(graph.find_nodes(op="placeholder")) - written
    sources, found = {node for node in inputs if _dtype(node) is torch.bool}, []
    for node in graph.nodes:
        if node.op != "call_function" or node in backward or not isinstance(node.args[0], Node):
            continue
        given, *others = node.all_input_nodes
        chosen = node.target is torch.ops.aten.where.self and node.args[0] in sources and not any(map(_sizes, others))
        carried = returns_view(node.target) or node.target is torch.ops.aten.constant_pad_nd.default
        if chosen or (carried and given in found):
            found.append(node)
        elif returns_view(node.target) and given in sources:
            sources.add(node)
    return found


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _sizes(node: Node) -> tuple:
    return tuple(getattr(node.meta.get("val"), "shape", (None,)))


def _written(graph: Graph) -> set[Node]:
    """Inputs that the forward mutates: in the graph, or after it, where AOTAutograd copies an output into them."""
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
    """Values that the forward computes from a buffer before mutating it: the backward would read another value."""
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
