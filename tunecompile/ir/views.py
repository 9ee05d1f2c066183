"""Views in graphs of ATen's operators: what they are of, and one that fixes how a value lies in memory."""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from tunecompile.ir.op import returns_view

aten = torch.ops.aten
CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)  #: to another dtype


def is_view(node: Node) -> bool:
    """Return whether a node is a view of its first operand, or one of the views that a split makes."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    return is_view(node.all_input_nodes[0]) if node.target is operator.getitem else returns_view(node.target)


def base_of(node: Node) -> Node:
    """Return what a view is of, in the end; another node itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def cast_of(node: object) -> tuple[object, torch.dtype | None]:
    """Return what a cast reads and the dtype that it casts to; of another node itself and None."""
    casts = isinstance(node, Node) and node.target in CASTS
    if not casts or (node.target is CASTS[1] and node.kwargs.keys() != {"dtype"}):
        return node, None
    return node.args[0], node.meta["val"].dtype


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions from the outermost in memory to the innermost."""
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))


def inverse(order: tuple[int, ...]) -> list[int]:
    """Return the permutation that undoes one by `order`."""
    return [order.index(dim) for dim in range(len(order))]


def with_strides(graph: Graph, node: Node) -> Node:
    """Return a new view of a whole tensor that has its sizes and strides.

    Inductor computes what `as_strided` reads where it stands, and stores it as the graph says.
    """
    last, value = node, node.meta["val"]

    def known(target: Any, sizes: Any) -> list[Any]:
        nonlocal last
        found: list[Any] = list(sizes)
        for i, size in enumerate(sizes):
            if not isinstance(size, int):
                found[i] = last = call_behind(graph, last, target, node, i, made=size)
        return found

    sizes, strides = known(aten.sym_size.int, value.shape), known(aten.sym_stride.int, value.stride())
    return call_behind(graph, last, aten.as_strided.default, node, sizes, strides, made=value)


def call_behind(graph: Graph, node: Node, target: Any, *args: Any, made: Any) -> Node:
    """Return a new call behind a node, of the node's source line.

    Args:
        graph: of the node.
        node: behind which it stands.
        target: what is called.
        args: its arguments.
        made: its fake value.
    """
    with graph.inserting_after(node):
        new = graph.call_function(target, args)
    new.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
    new.meta["val"] = made
    return new
