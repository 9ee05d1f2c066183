"""Recompute attention's output in the backward pass, where no random numbers are drawn.

torch tags attention as random whatever its dropout is, so its partitioner saves attention's results, or else the
generator's state with two calls around each attention. Without dropout nothing is drawn. So once the graphs are cut,
the backward calls attention once more on the q, k and v that attention's backward reads anyway, and of the forward's
results only the softmax sums are saved.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from tunecompile.ir.op import aten_name, returns_view


def is_recomputable(node: Node) -> bool:
    """Whether this is a fused attention without dropout."""
    name = aten_name(node.target) if node.op == "call_function" else ""
    return (
        name.startswith("_scaled_dot_product")
        and not name.endswith("_backward")
        and bound_arguments(node).get("dropout_p") == 0.0
    )


def bound_arguments(node: Node) -> dict[str, Any]:
    """The arguments of an ATen call by name, defaults included."""
    arguments = _schema(node)
    given = {a.name: value for a, value in zip((a for a in arguments if not a.kwarg_only), node.args)}
    return {**{a.name: a.default_value for a in arguments}, **given, **node.kwargs}


def _schema(node: Node) -> list[torch.Argument]:
    """The declared arguments of an ATen call."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.arguments


def recompute_in_backward(forward: Graph, backward: Graph, outputs: int) -> int:
    """Let the backward graph recompute each attention without dropout whose output the forward graph saves.

    Args:
        forward: changed in place: it returns these outputs no more.
        backward: changed in place: it calls attention in their place.
        outputs: how many of the forward graph's results are its caller's; the others are saved for the backward.

    Returns:
        How many attentions are recomputed.
    """
    output, given = forward.output_node(), {node.name: node for node in backward.nodes if node.op == "placeholder"}
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    returned, left = list(results), set()
    for place, saved in enumerate(returned[outputs:], outputs):
        call = saved.args[0] if isinstance(saved, Node) and saved.target is getitem and saved.args[1] == 0 else None
        if (
            isinstance(saved, Node)
            and isinstance(call, Node)
            and is_recomputable(call)
            and saved not in returned[:outputs]
            and _recompute(backward, given[saved.name], call)
        ):
            left.add(place)
    output.args = (tuple(value for place, value in enumerate(returned) if place not in left),)
    if (named := output.meta.get("desc")) is not None:
        output.meta["desc"] = [value for place, value in enumerate(named) if place not in left]
    return len(left)


def _recompute(backward: Graph, given: Node, call: Node) -> bool:
    """Call attention in the backward graph, before the first reader of its output, in place of the input `given`."""
    name = f"{aten_name(call.target)}_backward"
    reader = next(
        (
            node
            for node in backward.nodes
            if aten_name(node.target) == name and _origin(bound_arguments(node)["out"]) is given
        ),
        None,
    )
    if reader is None:
        return False
    here, there = bound_arguments(call), bound_arguments(reader)
    values = {key: there.get(key) if isinstance(value, Node) else value for key, value in here.items()}
    wanted = [values[key] for key, value in here.items() if isinstance(value, Node)]
    first = next(node for node in backward.nodes if given in node.all_input_nodes)
    sources = _sources(wanted)
    if not all(isinstance(value, Node) for value in wanted) or given in sources:
        return False
    order = {node: i for i, node in enumerate(backward.nodes)}
    for node in sorted((n for n in sources if order[n] > order[first]), key=order.__getitem__):
        first.prepend(node)
    arguments = _schema(call)
    assert callable(call.target)
    with backward.inserting_before(first):
        recomputed = backward.call_function(
            call.target,
            tuple(values[a.name] for a in arguments if not a.kwarg_only),
            {a.name: values[a.name] for a in arguments if a.kwarg_only},
        )
        made = backward.call_function(getitem, (recomputed, 0))
    recomputed.meta, made.meta = {"val": call.meta["val"]}, {"val": given.meta["val"]}
    given.replace_all_uses_with(made)
    backward.erase_node(given)
    return True


def _origin(value: Any) -> Any:
    """The value that this is a view of, through all views."""
    while isinstance(value, Node) and value.op == "call_function" and returns_view(value.target):
        value = value.all_input_nodes[0]
    return value


def _sources(nodes: list[Any]) -> set[Node]:
    """The nodes and everything that they depend on."""
    found: set[Node] = set()
    pending = [node for node in nodes if isinstance(node, Node)]
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found
