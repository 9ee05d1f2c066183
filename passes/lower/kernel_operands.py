"""Tensors that launches of kernels read are computed once, and stand in memory until their last reader has run.

Inductor fixes the strides of a launch's operands. It does so by a copy for every launch that reads what no product or
kernel has written: the normalised keys of a delta rule, which six kernels read, were there six times. The copies take
time, and lie in memory where kernels that make them are joined. What `as_strided` reads is computed where it is, once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.views import base_of, is_view, with_strides
from tunecompile.planner.liveness import is_fused

__all__ = ["PASS"]

aten = torch.ops.aten
LAUNCH = "triton_kernel_wrapper_functional"  #: torch's operator


def run(graph: Graph, context: Context) -> None:
    launches = [node for node in graph.nodes if getattr(node.target, "__name__", "") == LAUNCH]
    written = {base_of(value) for launch in launches for value in _operands(launch, written=True)}
    found = {base_of(value): None for launch in launches for value in _operands(launch, written=False)}
    for root in found:
        if root not in written and _is_computed(root) and len(set(_readers(root))) > 1:
            _store(graph, root)


def _operands(launch: Node, written: bool) -> Iterator[Node]:
    """Tensors that a launch writes to, or those that it only reads."""
    given: Any = launch.kwargs["kwargs"]
    places: Any = launch.kwargs["tensors_to_clone"]
    for name, value in given.items():
        if isinstance(value, Node) and (name in places) is written:
            yield value


def _readers(node: Node) -> Iterator[Node]:
    """The calls that read a node, through all views of it."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_computed(node: Node) -> bool:
    """Whether a node is element-wise code with a dense result that stays in the graph. (Pieces of a concatenation are
    written in place, and what the graph returns is stored anyway.)"""
    if node.op != "call_function" or not is_fused(node) or node.target is aten.cat.default:
        return False
    stored = any(user.target is aten.as_strided.default for user in node.users)
    returned = any(user.op == "output" for user in _readers(node))
    return _is_contiguous(node.meta["val"]) and not stored and not returned


def _is_contiguous(value: torch.Tensor) -> bool:
    """Whether elements follow each other in memory, from its beginning on."""
    dense = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if stride != dense:
            return False
        dense = dense * size
    return value.storage_offset() == 0


def _store(graph: Graph, node: Node) -> None:
    """Let all readers of a node read a view of it that fixes its strides."""
    readers = list(node.users)
    stored = with_strides(graph, node)
    for reader in readers:
        reader.replace_input_with(node, stored)


PASS = Pass("kernel_operands", "lower", run, requires=frozenset({"choose_provider"}))
