"""How many bytes a compiled graph needs beside its inputs, from the graph alone.

A value is in memory where a call that is not element-wise reads or makes it, and where the graph returns it.
Element-wise code in between lives in registers. A buffer is freed after its last reader. This is a model of Inductor,
not Inductor's own account, which exists only once code is generated. It holds as long as Inductor keeps the graph's
order (tunecompile/_torch/generation/kernel_order.py) and computes what kernels read once (passes/lower/
kernel_operands.py): it is right to within a few per cent of a layer's bytes then, and the planner learns the rest from
measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from tunecompile._torch.fake_tensors import size_hint
from tunecompile.ir.op import OPS, aten_name, returns_view
from tunecompile.ir.pretend_gpu import on_gpu

_FUSED = (
    "clone",
    "_to_copy",
    "convert_element_type",
    "full",
    "full_like",
    "zeros_like",
    "ones_like",
    "scalar_tensor",
    "arange",
    "iota",
    "where",
    "constant_pad_nd",
    "copy",
    "cat",
    "select_scatter",
    "slice_scatter",
)


@dataclass(frozen=True)
class Lifetime:
    """The memory of one run of a graph, in bytes."""

    peak: int  #: the most bytes held at once, beside the graph's inputs
    pieces: tuple[int, ...]  #: bytes of each returned tensor, the largest first

    @property
    def returned(self) -> int:
        """Bytes of all returned tensors."""
        return sum(self.pieces)


def tensor_bytes(value: Any) -> int:
    """Bytes of a dense tensor of this shape; 0 for other values."""
    return size_hint(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


class GraphMemory:
    """Which of a graph's values are in memory, and which exist only in registers."""

    def __init__(self, graph: Graph):
        self.roots: dict[Node, Node | None] = {}
        for node in graph.nodes:
            self.roots[node] = _root(node, self.roots)

    def writes(self, node: Node) -> bool:
        """Whether the value gets a buffer of its own."""
        return self.roots[node] is node

    def reads(self, node: Node) -> set[Node]:
        """The nodes whose buffers are read when the value is computed, the graph's inputs among them."""
        return _reads(node, self.roots, inputs=True)


def node_bytes(node: Node) -> int:
    """Bytes of all tensors that a node returns."""
    value = node.meta.get("val")
    return sum(map(tensor_bytes, value)) if isinstance(value, (tuple, list)) else tensor_bytes(value)


def extent(graph: Graph) -> Lifetime:
    """Walk a graph in order, as generated code runs, and count bytes.

    Args:
        graph: lowered, with fake values under `meta["val"]`.

    Returns:
        Peak and returned bytes, at the hinted sizes.
    """
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    output = nodes[-1]
    roots = GraphMemory(graph).roots
    reads = {node: _reads(node, roots) if node.op != "placeholder" else set() for node in nodes}
    last: dict[Node, int] = {}
    for node in nodes:
        if roots[node] is node or _runs(node):  # fused code reads when its consumer runs
            for source in reads[node]:
                last[source] = place[node]
    returned = {root for node in output.all_input_nodes if (root := roots[node]) is not None}
    dying: dict[int, list[Node]] = {}
    for source, when in last.items():
        dying.setdefault(when, []).append(source)
    live = peak = 0
    for node in nodes[:-1]:
        peak = max(peak, live + (_results(node) + needed if (needed := workspace(node)) else 0))
        if roots[node] is node:
            if node.target is torch.ops.aten.cat.default:
                live -= _take_over(node, roots, last, place, returned, dying)
            live += tensor_bytes(node.meta.get("val"))
            peak = max(peak, live)
            if node not in last:
                live -= tensor_bytes(node.meta.get("val"))
        live -= sum(
            tensor_bytes(source.meta.get("val")) for source in dying.get(place[node], ()) if source not in returned
        )
    return Lifetime(peak, tuple(sorted((tensor_bytes(node.meta.get("val")) for node in returned), reverse=True)))


def _take_over(
    cat: Node,
    roots: dict[Node, Node | None],
    last: dict[Node, int],
    place: dict[Node, int],
    returned: set[Node],
    dying: dict[int, list[Node]],
) -> int:
    """Bytes of products whose only reader is this concatenation: they were written into its buffer."""
    found = {
        root
        for source in cat.all_input_nodes
        if (root := roots[source]) is not None
        and root.target is torch.ops.aten.mm.default
        and last.get(root) == place[cat]
        and root not in returned
        and root is source
    }
    dying[place[cat]] = [source for source in dying.get(place[cat], ()) if source not in found]
    return sum(tensor_bytes(root.meta["val"]) for root in found)


def workspace(node: Node) -> int:
    """Bytes that a vendor's kernel, or a provider of an op, needs beside its results while it runs.

    The backward of attention sums dq in fp32, and makes dk and dv for every head of q before it adds them up. (cuDNN
    with 32 heads of q and 8 of k: 5 times q.)
    """
    op, name = OPS.get(node.target), aten_name(node.target)
    if op is not None and op.room is not None:
        return op.room(*torch.fx.map_arg(node.args, lambda given: given.meta["val"]))
    if not ("attention" in name and "backward" in name):
        return 0
    tensors = [
        argument.meta["val"] for argument in node.all_input_nodes if isinstance(argument.meta.get("val"), torch.Tensor)
    ]
    if len(tensors) < 3 or not on_gpu(tensors[1]):
        return 0
    _, q, k = tensors[:3]  # the gradient comes first
    grouped = q.shape[1] != k.shape[1]
    return size_hint(q.numel()) * (4 + q.element_size() * (3 if grouped else 1))


def _results(node: Node) -> int:
    """Bytes of the gradients of q, k and v."""
    value = node.meta["val"]
    return sum(map(tensor_bytes, value[:3])) if isinstance(value, (tuple, list)) else tensor_bytes(value)


def _root(node: Node, roots: dict[Node, Node | None]) -> Node | None:
    """The node in whose buffer this node's value is; None for inputs and for values that are never in memory."""
    if node.op != "call_function":
        return None
    if node.target is getitem:
        return _member(node, roots)
    if (source := _viewed(node)) is not None:
        return roots[source]
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    return node if not is_fused(node) or any(_needs_memory(user) for user in node.users) else None


def _member(node: Node, roots: dict[Node, Node | None]) -> Node | None:
    """The buffer of one of a call's results: its own, the split tensor's, or the one a Triton kernel writes to."""
    call, key = node.args
    assert isinstance(call, Node)
    if isinstance(key, str):
        given: Any = call.kwargs.get("kwargs", {})
        written = given.get(key)
        return roots.get(written, node) if isinstance(written, Node) and written.op != "placeholder" else node
    source = _viewed(call)
    return node if source is None else roots[source]


def _viewed(node: Node) -> Node | None:
    """The tensor that a view is of; None for other calls."""
    return next(iter(node.all_input_nodes), None) if returns_view(node.target) else None


def is_fused(node: Node) -> bool:
    """Whether the call is element-wise code, which is fused into its readers."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or aten_name(target) in _FUSED
    )


def _runs(node: Node) -> bool:
    """Whether a kernel is called here, or the graph ends."""
    return node.op == "output" or (node.op == "call_function" and node.target is not getitem and not is_fused(node))


def _needs_memory(user: Node) -> bool:
    """Whether a reader needs its operand in memory, by itself or through a view of it."""
    if user.op == "output":
        return True
    if _viewed(user) is not None or user.target is getitem:
        return any(_needs_memory(reader) for reader in user.users)
    return not is_fused(user)


def _reads(node: Node, roots: dict[Node, Node | None], inputs: bool = False) -> set[Node]:
    """The nodes whose buffers are read when this node is computed, through all that is fused into it.

    inputs: count the graph's inputs, too.
    """
    found: set[Node] = set()
    pending, seen = list(node.all_input_nodes), set()
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        root = roots[source]
        if (root is not None and root is not node) or (inputs and source.op == "placeholder"):
            found.add(root or source)
        elif root is None and source.op == "call_function":
            pending.extend(source.all_input_nodes)
    return found
