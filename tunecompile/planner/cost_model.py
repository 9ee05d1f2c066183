"""How long a graph's kernels take, from the graph alone: math, memory traffic and launches.

The model is a roofline (Williams et al., 2009): a product with few operations a byte takes as long as its memory
traffic. Element-wise code is taken to be fused as in `liveness.py`: between two calls, a value in memory is read once,
and a value that is needed in memory is written once.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import FlopCounterMode

from tunecompile._torch.fake_tensors import fake_mode_of, size_hint
from tunecompile.ir.nodes import outputs_read
from tunecompile.ir.op import OPS, Cost, aten_name
from tunecompile.planner.device_memory import gradient_bytes
from tunecompile.planner.hardware import Rates
from tunecompile.planner.liveness import GraphMemory, node_bytes

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm")
RIDGE = 160  #: operations a byte below which a product is bound by memory. H200: 690 TFLOPS by 4.1 TB/s

#: Share of a lone product's rate that a GPU sustains: one that multiplies all the time lowers its clock. Whole steps on
#: an H200: 0.90 to 0.97
SUSTAINED = 0.94
#: Share of that rate that grouped products reach. An H100 with 128 experts: 520 TFLOP/s, with 32 and adapters: 450
GROUPED = 0.65
INTEGERS = 1.65  #: times as many operations in INT8. An H200's whole step: 480 ms in bf16, 353 so
GAP = 0.004  #: milliseconds from one kernel to the next. Whole steps on an H200: 3.5 to 4 us


@dataclass(frozen=True)
class Work:
    """The work of one graph, or of several together."""

    products: int = 0  #: floating point operations of products
    attention: int = 0  #: floating point operations of attention, as if nothing were masked
    traffic: int = 0  #: bytes that other kernels read and write, and those of products that their math does not hide
    kernels: int = 0  #: launches
    grouped: int = 0  #: floating point operations of grouped products: rows, each with the matrix of its expert

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.traffic + other.traffic,
            self.kernels + other.kernels,
            self.grouped + other.grouped,
        )

    def attending(self, share: float) -> Work:
        """The same where queries see another number of keys. share: of those that they see here."""
        return replace(self, attention=int(share * self.attention))

    @property
    def flops(self) -> int:
        """Floating point operations of products and attention."""
        return self.products + self.grouped + self.attention

    def math_ms(self, rates: Rates, scale: float = 1.0) -> float:
        """Milliseconds of products and attention, for `scale` times the tokens."""
        products = self.products + self.grouped / GROUPED
        return scale * (products / rates.flops + self.attention / rates.attention) / SUSTAINED

    def ms(self, rates: Rates, scale: float = 1.0) -> float:
        """Milliseconds of all kernels and of the gaps between them, for `scale` times the tokens."""
        return (
            self.math_ms(rates, scale)
            + scale * self.traffic / rates.bandwidth
            + (self.kernels * GAP if rates.launches else 0.0)
        )


def graph_work(graph: Graph) -> Work:
    """The work of a lowered graph, at the hinted sizes."""
    memory, done = GraphMemory(graph), Work()
    read: set[Node] = set()  # values read since the last call
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node_cost(node) is Cost.MATMUL or is_attention(node):
            done += _product(node)
            read.clear()
        elif isinstance(node.target, torch._ops.HigherOrderOperator):  # a Triton kernel
            done += _launch(node)
            read.clear()
        elif memory.writes(node) and "empty" not in aten_name(node.target):
            fresh = memory.reads(node) - read
            done += Work(traffic=node_bytes(node) + sum(map(node_bytes, fresh)), kernels=not read)
            read |= fresh
    return done


def beside_layers(heads: Sequence[torch.Tensor], trained: Sequence[torch.Tensor], tokens: int) -> Work:
    """The work of head and loss (logits and their gradient in one pass over them), and of AdamW.

    Args:
        heads: weights [vocabulary, hidden] of the heads.
        trained: all trained parameters.
        tokens: of one batch.
    """
    products = sum(2 * tokens * w.numel() * (2 + w.requires_grad) for w in heads)
    logits = sum(tokens * w.shape[0] * w.element_size() for w in heads)
    return Work(products, traffic=2 * logits + 7 * gradient_bytes(trained))


def _product(node: Node) -> Work:
    """The work of one product or attention call."""
    operations, moved = flops(node), node_bytes(node) + sum(map(node_bytes, set(node.all_input_nodes)))
    if is_attention(node):
        return Work(attention=operations, kernels=1)
    exposed = max(0, moved - operations // RIDGE)  # bytes beyond those that the math hides
    if _is_grouped(node):
        return Work(grouped=operations, traffic=exposed, kernels=1)
    rate = 2 if "scaled" in aten_name(node.target) else 1  # FP8 has twice the rate
    # a matrix that is added is copied to the output first
    copies = int("addmm" in aten_name(node.target) and node.all_input_nodes[0].meta["val"].dim() > 1)
    return Work(operations // rate, traffic=exposed + copies * 2 * node_bytes(node), kernels=1 + copies)


def _launch(node: Node) -> Work:
    """The work of one launch of a Triton kernel."""
    if operations := node.meta.get(_ATTENTION):
        return Work(attention=operations, kernels=1)
    products, grouped = node.meta.get(_LAUNCHED, 0), node.meta.get(_GROUPED, 0)
    exposed = max(0, _launched_bytes(node) - (products + grouped) // RIDGE)
    return Work(products, traffic=exposed, kernels=1, grouped=grouped)


def share_flops(call: Node, nodes: Sequence[Node]) -> None:
    """Note on Triton launches what they multiply: no launch shows it.

    Args:
        call: of an op. Products that it became beside the launches are counted by themselves.
        nodes: what it became in a lowered graph. Launches that read and write more have more of the operations.
    """
    launches = [node for node in nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]
    op, attends = OPS.get(call.target), is_attention(call)
    if not launches or not (attends or (op is not None and op.flops is not None)):
        return
    apart = [n for n in nodes if n.op == "call_function" and (is_attention(n) or node_cost(n) is Cost.MATMUL)]
    rest = max(0, flops(call) - sum(map(flops, apart)))
    dtypes = {getattr(value.meta.get("val"), "dtype", None) for node in launches for value in _nodes(node)}
    if torch.int8 in dtypes:
        rest = round(rest / INTEGERS)
    moved = [_launched_bytes(node) for node in launches]
    kind = _ATTENTION if attends else _GROUPED if _is_grouped(call) else _LAUNCHED
    for at, node in enumerate(launches):  # what is left over by rounding is the last one's
        share = rest * moved[at] // max(1, sum(moved[at:]))
        node.meta[kind], rest = share, rest - share


def _launched_bytes(node: Node) -> int:
    """Bytes that a Triton launch reads or writes."""
    return sum(map(node_bytes, set(_nodes(node))))


def _nodes(node: Node) -> list[Node]:
    """The tensors that a Triton launch reads or writes."""
    given: Any = node.kwargs.get("kwargs", {})
    return [value for value in given.values() if isinstance(value, Node)]


def node_cost(node: Node) -> Cost | None:
    """The cost class of an op or an ATen call; None leaves the decision to the partitioner."""
    if node.target in OPS:
        return OPS[node.target].cost
    name = aten_name(node.target)
    return Cost.MATMUL if name in _PRODUCTS or (is_attention(node) and "backward" not in name) else None


def flops(node: Node) -> int:
    """Floating point operations of a product or attention call, at the hinted sizes; 0 without a formula."""
    args, kwargs = torch.fx.map_arg((list(node.args), dict(node.kwargs)), lambda n: n.meta["val"])
    if (op := OPS.get(node.target)) is not None and op.flops is not None:
        read = {"used": outputs_read(node)} if "used" in inspect.signature(op.flops).parameters else {}
        return size_hint(op.flops(*args, **kwargs, **read))
    if _is_grouped(node):
        return _grouped_flops(*args[:2])
    if is_attention(node):
        return _attention_flops(node, args, kwargs)
    run: Any = node.target if op is None else op.reference
    with fake_mode_of((args, kwargs)) or torch.no_grad(), FlopCounterMode(display=False) as counter:
        run(*args, **kwargs)
    return size_hint(counter.get_total_flops())


def is_attention(node: Node) -> bool:
    """Whether this is a fused attention kernel, forward or backward."""
    return "attention" in aten_name(node.target)


def _is_grouped(node: Node) -> bool:
    """Whether this multiplies rows, each by the matrix of its expert."""
    op = OPS.get(node.target)
    if op is not None:
        return op.cost is Cost.MATMUL and {"weight", "offsets"} <= {*op.parameters}
    return aten_name(node.target).endswith("_grouped_mm")


def _attention_flops(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Operations of both products, or of the backward's five, as if nothing were masked within documents and windows.

    torch's counter refuses fewer heads of k than of q.
    """
    backward = "backward" in aten_name(node.target)
    op = OPS.get(node.target)
    if op is not None and {"q", "k", "longest", "window"} <= {*op.parameters}:
        given = dict(zip(op.parameters, args)) | kwargs
        return _operations(backward, given["q"], given["longest"], given["window"] or None)
    q, k = [value for value in args if isinstance(value, torch.Tensor)][backward : backward + 2]  # behind the gradient
    keys = size_hint(k.shape[-2] if k.dim() == 4 else k.shape[0])
    if k.dim() == 3 and len(args) > _LONGEST[backward]:  # a row of documents
        keys = min(keys, size_hint(args[_LONGEST[backward]]))
    window = kwargs.get("window_size_left")
    seen = window + 1 if isinstance(window, int) and window >= 0 else None
    return _operations(backward, q, keys, seen)


def document_attention(graph: Graph) -> tuple[int, int]:
    """Tokens of the longest document of a graph's attention, and of its window, 0 for none; (0, 0) where it has no such
    attention, or several kinds.
    """
    found = set()
    for node in graph.nodes:
        op = OPS.get(node.target)
        if op is not None and {"q", "k", "longest", "window"} <= {*op.parameters}:
            given = torch.fx.map_arg(dict(zip(op.parameters, node.args)) | dict(node.kwargs), lambda n: n.meta["val"])
            found.add((size_hint(given["longest"]), given["window"] or 0))
    return found.pop() if len(found) == 1 else (0, 0)


def _grouped_flops(left: Any, right: Any) -> int:
    """Operations of a grouped product, of which torch's counter knows nothing: of rows [S, K] with matrices [E, K, N],
    each with one, or of [M, S] and [S, N], whose sums over S are split.
    """
    if left.dim() == 2:
        return size_hint(2 * left.numel() * right.shape[-1])
    return size_hint(2 * right.numel() * left.shape[-2])


def _operations(backward: bool, q: torch.Tensor, keys: Any, window: int | None) -> int:
    """Operations of each query's products with so many keys, or with those in its window."""
    seen = size_hint(keys) if window is None else min(size_hint(keys), window)
    return int((10 if backward else 4) * size_hint(q.numel()) * seen)


#: key of a Triton launch's `meta`: floating point operations of the attention that it computes
_ATTENTION = "tunecompile_attention"
#: the same of grouped products, and of other ones
_GROUPED, _LAUNCHED = "tunecompile_grouped", "tunecompile_products"
#: where flash attention of documents has the length of the longest, forward and backward
_LONGEST = (6, 9)
