"""Adjacent pairs of the last dimension, taken apart and written back: one spelling, slices and a stack.

Rotary embeddings split a row into pairs by a reshape and `unbind`, and some write the members into every second element
of an empty tensor: mutations, which no match may contain.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from tunecompile.ir.nodes import between, is_barrier, node_arg

_SPLITS = {"unflatten", "reshape", "view", torch.unflatten, torch.reshape}
_EMPTY = {torch.empty_like, torch.empty, "new_empty"}


def _value(node: Node | None) -> torch.Tensor | None:
    found = None if node is None else node.meta.get("example_value")
    return found if isinstance(found, torch.Tensor) else None


def slice_of_item(node: Node) -> tuple[str, Any, tuple, dict] | None:
    """Spell a member of `x.unflatten(-1, (-1, 2)).unbind(-1)` as `x[..., i::2]`, and halves likewise.

    Args:
        node: a `getitem`.

    Returns:
        The canonical op, target, args and kwargs; None for any other item.
    """
    parts = node_arg(node, 0)
    if parts is None or parts.target not in ("unbind", torch.unbind):
        return None
    split = node_arg(parts, 0)
    source = node_arg(split, 0) if split is not None and split.target in _SPLITS else None
    before, after, at = _value(source), _value(split), node.args[1]
    dim = parts.args[1] if len(parts.args) > 1 else parts.kwargs.get("dim", 0)
    if before is None or after is None or not isinstance(dim, int) or at not in (0, 1):
        return None
    width, dim = before.shape[-1], dim % after.dim()
    if not isinstance(width, int) or width % 2 or after.shape[:-2] != before.shape[:-1]:
        return None
    if dim == after.dim() - 1 and tuple(after.shape[-2:]) == (width // 2, 2):
        part = slice(at, None, 2)
    elif dim == after.dim() - 2 and tuple(after.shape[-2:]) == (2, width // 2):
        part = slice(width // 2, None, None) if at else slice(None, width // 2, None)
    else:
        return None
    return "call_function", operator.getitem, (source, (..., part)), {}


def join_written(graph: Graph) -> None:
    """Put a stack in the place of an empty tensor whose even and odd elements are written.

    Args:
        graph: of Dynamo, changed in place.
    """
    for empty in [node for node in graph.nodes if node.target in _EMPTY]:
        writes = [user for user in empty.users if user.target is operator.setitem and user.args[0] is empty][:2]
        if len(writes) == 2 and _is_whole(empty, writes):
            _join(graph, empty, writes)


def _is_whole(empty: Node, writes: list[Node]) -> bool:
    """Whether two writes fill every second element each, before anything else reads or writes the tensor."""
    out = _value(empty)
    if out is None or out.dim() == 0 or not isinstance(out.shape[-1], int) or out.shape[-1] % 2:
        return False
    shape = (*out.shape[:-1], out.shape[-1] // 2)
    values = [_value(node_arg(write, 2)) for write in writes]
    if any(each is None or tuple(each.shape) != shape or each.device != out.device for each in values):
        return False
    if sorted(map(_offset, writes)) != [0, 1] or not out.is_contiguous():
        return False
    first, second = writes
    if any(is_barrier(node) for node in between(first, second) if node not in writes):
        return False
    return all(user in writes or user > second for user in empty.users)


def _offset(write: Node) -> int:
    """Where the every second element begins that it writes; -1 if it writes others."""
    index = write.args[1]
    if not (isinstance(index, tuple) and len(index) == 2 and index[0] is ... and isinstance(index[1], slice)):
        return -1
    start, stop, step = index[1].start, index[1].stop, index[1].step
    return (start or 0) if stop is None and step == 2 and start in (None, 0, 1) else -1


def _join(graph: Graph, empty: Node, writes: list[Node]) -> None:
    second, out = writes[1], empty.meta["example_value"]
    members = [member for write in sorted(writes, key=_offset) if (member := node_arg(write, 2)) is not None]
    made: list[Node] = []

    def call(op: str, target: Any, args: tuple, found: Any) -> Node:
        node = graph.create_node(op, target, args)
        node.meta = {**second.meta, "example_value": found}
        made.append(node)
        return node

    with graph.inserting_before(second):
        values = [member.meta["example_value"] for member in members]
        pair = call("call_function", torch.stack, (tuple(members), -1), torch.stack(values, -1))
        joined = call("call_method", "flatten", (pair, -2, -1), pair.meta["example_value"].flatten(-2, -1))
        if joined.meta["example_value"].dtype != out.dtype:
            joined = call("call_method", "to", (joined, out.dtype), joined.meta["example_value"].to(out.dtype))
    for write in writes:
        graph.erase_node(write)
    empty.replace_all_uses_with(joined, delete_user_cb=lambda user: user not in made)
    graph.erase_node(empty)
