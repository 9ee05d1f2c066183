"""Attention's output computed again in the backward pass, where no chance is in it.

torch tags attention as drawing random numbers whatever its dropout is, so its partitioner saves what attention returns, or else the generator's
state and two calls around each one. Without dropout nothing is drawn. So once the graphs are cut, the backward calls attention once more on
the q, k and v that attention's backward reads anyway, and of the forward's results only the sums of its softmax are saved.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch.fx import Graph, Node

from tunecompile.ir.op import aten_name, returns_view


def repeatable(node: Node) -> bool:
    """Whether this is a fused attention without dropout."""
    name = aten_name(node.target) if node.op == "call_function" else ""
    return (
        name.startswith("_scaled_dot_product")
        and not name.endswith("_backward")
        and bound(node).get("dropout_p") == 0.0
    )


def bound(node: Node) -> dict[str, Any]:
    """A call's arguments by name, those that it leaves out too."""
    arguments = node.target._schema.arguments
    given = {a.name: value for a, value in zip((a for a in arguments if not a.kwarg_only), node.args)}
    return {**{a.name: a.default_value for a in arguments}, **given, **node.kwargs}


def compute_again(forward: Graph, backward: Graph, outputs: int) -> int:
    """Let the backward graph make the output of each repeatable attention that the forward saves for it. outputs: of the forward graph that
    are its caller's. Returns how many there were."""
    output, given = forward.output_node(), {node.name: node for node in backward.nodes if node.op == "placeholder"}
    returned, left = list(output.args[0]), set()
    for place, saved in enumerate(returned[outputs:], outputs):
        call = saved.args[0] if isinstance(saved, Node) and saved.target is getitem and saved.args[1] == 0 else None
        if (
            isinstance(call, Node)
            and repeatable(call)
            and saved not in returned[:outputs]
            and _repeat(backward, given[saved.name], call)
        ):
            left.add(place)
    output.args = (tuple(value for place, value in enumerate(returned) if place not in left),)
    if (named := output.meta.get("desc")) is not None:
        output.meta["desc"] = [value for place, value in enumerate(named) if place not in left]
    return len(left)


def _repeat(backward: Graph, given: Node, call: Node) -> bool:
    """Call it in the backward graph, before its output is read for the first time, in place of what is given."""
    name = f"{aten_name(call.target)}_backward"
    reader = next(
        (node for node in backward.nodes if aten_name(node.target) == name and _origin(bound(node)["out"]) is given),
        None,
    )
    if reader is None:
        return False
    here, there = bound(call), bound(reader)
    values = {key: there.get(key) if isinstance(value, Node) else value for key, value in here.items()}
    wanted = [values[key] for key, value in here.items() if isinstance(value, Node)]
    first = next(node for node in backward.nodes if given in node.all_input_nodes)
    sources = _sources(wanted)
    if not all(isinstance(value, Node) for value in wanted) or given in sources or first in sources:
        return False
    order = {node: i for i, node in enumerate(backward.nodes)}
    for node in sorted((n for n in sources if order[n] > order[first]), key=order.get):
        first.prepend(node)
    arguments = call.target._schema.arguments
    with backward.inserting_before(first):
        again = backward.call_function(
            call.target,
            tuple(values[a.name] for a in arguments if not a.kwarg_only),
            {a.name: values[a.name] for a in arguments if a.kwarg_only},
        )
        made = backward.call_function(getitem, (again, 0))
    again.meta, made.meta = {"val": call.meta["val"]}, {"val": given.meta["val"]}
    given.replace_all_uses_with(made)
    backward.erase_node(given)
    return True


def _origin(value: Any) -> Any:
    """What this is a view of."""
    while isinstance(value, Node) and value.op == "call_function" and returns_view(value.target):
        value = value.all_input_nodes[0]
    return value


def _sources(nodes: list[Any]) -> set[Node]:
    """These and all that they are made of."""
    found, pending = set(), [node for node in nodes if isinstance(node, Node)]
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found
