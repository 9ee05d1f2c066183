"""Facts about one node: its arguments, whether it mutates a tensor, whether a match may contain its neighbours."""

import functools
import inspect
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node


def node_arg(node: Node, i: int) -> Node | None:
    """Return the positional argument `i` of a node if it is a node; None if it is a constant, or missing."""
    argument = node.args[i] if i < len(node.args) else None
    return argument if isinstance(argument, Node) else None


def outputs_read(node: Node) -> tuple[bool, ...]:
    """Return of each output of a node that has several whether anything reads it."""
    read = [user.args[1] for user in node.users if user.target is operator.getitem and user.users]
    return tuple(at in read for at in range(len(node.meta["val"])))


_IN_PLACE_NAMES = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "setitem", "delitem"),
)
_IN_PLACE = {getattr(operator, name) for name in _IN_PLACE_NAMES}
_IN_PLACE_METHODS = {f"__{name}__" for name in _IN_PLACE_NAMES}


@functools.cache
def _inplace_position(target: Any) -> int | None:
    """The position of a function's parameter `inplace`, as functions of torch.nn.functional have it; else None."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin has no signature
        return None
    return names.index("inplace") if "inplace" in names else None


def is_mutation(node: Node) -> bool:
    """Return whether a node mutates a tensor.

    Args:
        node: a node of any graph.

    Returns:
        True for `add_`, `setitem`, `out=`, `inplace=True` and operators with a mutable schema.
    """
    if node.op == "call_method":
        method = str(node.target)
        return method in _IN_PLACE_METHODS or (method.endswith("_") and not method.endswith("__"))
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if node.target in _IN_PLACE or "out" in node.kwargs:
        return True
    name, position = getattr(node.target, "__name__", ""), _inplace_position(node.target)
    inplace = node.kwargs.get("inplace", position is not None and position < len(node.args) and node.args[position])
    return inplace is True or (name.endswith("_") and not name.startswith("_"))


def is_barrier(node: Node) -> bool:
    """Return whether no match may contain nodes from before and after this one.

    Args:
        node: a node of the recognize stage.

    Returns:
        True for a mutation, and for a change of grad, inference or autocast mode.
    """
    modes = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode"}
    return is_mutation(node) or (node.op == "call_function" and getattr(node.target, "__name__", "") in modes)


def first_of(graph: Graph, nodes: Collection[Node]) -> Node:
    """Return the one of some nodes of a graph that stands first."""
    return next(node for node in graph.nodes if node in nodes)


#: why what stands apart stays apart, for reports
DISTURBED = "a tensor in between is changed in place, or the mode of gradients or autocast is"


def is_disturbed(first: Node, last: Node, whole_numbers: bool = True) -> bool:
    """Return whether what `first` computes may not be computed in the place of `last`.

    Args:
        first: a node of the recognize stage.
        last: a node behind it, or the same.
        whole_numbers: whether changes of whole numbers in between count (labels and ids that neither of them reads).

    Returns:
        True where a barrier stands between them.
    """
    return any(
        is_barrier(node) and (whole_numbers or not _changes_whole_numbers(node)) for node in between(first, last)
    )


def between(first: Node, last: Node) -> Iterator[Node]:
    """Yield the nodes of a graph that stand between two, from the last one to the first."""
    node = last
    while node is not first:
        node = node.prev
        if node is not first:
            yield node


def _changes_whole_numbers(node: Node) -> bool:
    value = written_value(node)
    return value is not None and not value.is_floating_point() and not value.is_complex()


def written_value(node: Node) -> torch.Tensor | None:
    """Return the value of the tensor that a mutation of the recognize stage writes to; None if that is not known."""
    written = node_arg(node, 0) if is_mutation(node) and "out" not in node.kwargs else None
    value = None if written is None else written.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None
