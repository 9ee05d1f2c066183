"""One spelling for each operation: a pattern need not know whether a model wrote x.float() or x.to(torch.float32).

`TABLE` maps the target of a node, as Dynamo records it, to a function that returns the canonical (op, target, args,
kwargs). Patterns pass through the same table, so two calls with one canonical spelling match each other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch.modules import linear
from tunecompile.ir.nodes import is_barrier, is_mutation, node_arg
from tunecompile.ir.op import HALF
from tunecompile.ir.pairs import join_written, slice_of_item

__all__ = ["TABLE", "canonicalize", "drop_clones", "dtype_of", "name_of", "value"]

Spelling = tuple[str, Any, tuple, dict]  #: op, target, args and kwargs of a node
Spell = Callable[[Node], "Spelling | None"]

#: binary operations: method, function and operator all become the operator
_BINARY: dict[Any, tuple] = {
    operator.add: ("add", torch.add),
    operator.sub: ("sub", torch.sub),
    operator.mul: ("mul", torch.mul, torch.multiply, "multiply"),
    operator.truediv: ("div", torch.div, "true_divide", torch.true_divide),
    operator.pow: ("pow", torch.pow),
}
#: unary operations: method and function become the function, or the operator
_UNARY: dict[Any, tuple] = {
    operator.neg: ("neg", torch.neg, "negative"),
    torch.rsqrt: ("rsqrt",),
    torch.sqrt: ("sqrt",),
    torch.tanh: ("tanh", F.tanh),
    torch.sigmoid: ("sigmoid", F.sigmoid),
}
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def value(node: Any) -> Any:
    """Return the value of an argument, as far as it is known before autograd.

    Args:
        node: a node of the recognize stage, or a constant.

    Returns:
        The fake value that Dynamo recorded for the node (None if it recorded none), or the constant itself.
    """
    return node.meta.get("example_value") if isinstance(node, Node) else node


def dtype_of(node: Any) -> torch.dtype | None:
    """Return the dtype of a node's value, or None if it is no tensor.

    Args:
        node: a node of the recognize stage, or a constant.
    """
    return getattr(value(node), "dtype", None)


def name_of(target: Any) -> str:
    """Return a short name of the operation that a node calls.

    Args:
        target: the node's target.

    Returns:
        `mul`, `silu`, `to`; an operator with its namespace, as `aten.mul`.
    """
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    if isinstance(target, str):
        return target
    return _BINARY[target][0] if target in _BINARY else getattr(target, "__name__", str(target))


_ALIASES = {"axis": "dim", "keepdims": "keepdim"}  #: numpy's names of parameters, which torch accepts, too


def _arguments(node: Node, **defaults: Any) -> list | None:
    """The call's arguments in the order of `defaults`; None if it has others, or lacks a required one (`...`)."""
    given = dict(zip(defaults, node.args))
    named = {_ALIASES.get(name, name): item for name, item in node.kwargs.items()}
    if len(node.args) > len(defaults) or named.keys() - defaults.keys() or named.keys() & given.keys():
        return None
    values = [{**defaults, **given, **named}[name] for name in defaults]
    return None if any(item is ... for item in values) else values


def _in_order(op: str, target: Any, **defaults: Any) -> Spell:
    """Spell a call with all arguments by position, in the order of `defaults`."""

    def spell(node: Node) -> Spelling | None:
        found = _arguments(node, **defaults)
        return None if found is None else (op, target, tuple(found), {})

    return spell


def _binary(target: Callable) -> Spell:
    def spell(node: Node) -> Spelling | None:
        if node.kwargs or len(node.args) != 2:  # alpha=, rounding_mode=, out=: another operation
            return None
        sides: Any = node.args
        left, right = sides
        # not in half precision: CUDA's autocast computes powers in fp32, and products as they are
        if target is operator.mul and left is right and isinstance(left, Node) and dtype_of(left) not in HALF:
            return "call_function", operator.pow, (left, 2), {}
        if target is operator.mul and _is_factor(right) and (scaled := _scaled(left, node)) is not None:
            return "call_function", target, (scaled[0], scaled[1] * right), {}
        wide = isinstance(left, Node) and dtype_of(left) in (torch.float32, torch.float64)
        if target is operator.pow and wide and isinstance(right, float) and right == -0.5:
            return "call_function", torch.rsqrt, (left,), {}
        return "call_function", target, (left, right), {}

    return spell


def _scaled(node: Any, reader: Node) -> tuple[Any, float] | None:
    """The tensor and the number of a product that only another number multiplies, as adapters of kohya have it."""
    if not isinstance(node, Node) or node.target is not operator.mul or len(node.users) != 1:
        return None
    arguments: Any = node.args
    scaled, factor = arguments
    floating = isinstance(value(node), torch.Tensor) and value(node).is_floating_point()
    return (scaled, factor) if floating and _is_factor(factor) and not _barrier_between(node, reader) else None


def _is_factor(item: Any) -> bool:
    return isinstance(item, (int, float)) and not isinstance(item, bool)


def _unary(target: Callable) -> Spell:
    def spell(node: Node) -> Spelling | None:
        return None if node.kwargs or len(node.args) != 1 else ("call_function", target, node.args, {})

    return spell


def _square(node: Node) -> Spelling | None:
    found = _arguments(node, input=...)
    return None if found is None else ("call_function", operator.pow, (found[0], 2), {})


def _mean(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., dim=None, keepdim=False)
    if found is None or found[1] is None:
        return None
    dims = found[1]
    return "call_method", "mean", (found[0], tuple(dims) if isinstance(dims, (tuple, list)) else (dims,), found[2]), {}


def _to(node: Node) -> Spelling | None:
    rest = list(node.args[1:]) + list(node.kwargs.values())
    keys = set(node.kwargs) - {"dtype"}
    if len(rest) == 1 and not keys and isinstance(rest[0], torch.dtype):
        return "call_method", "to", (node.args[0], rest[0]), {}
    return None


def _cast(dtype: torch.dtype) -> Spell:
    def spell(node: Node) -> Spelling | None:
        if node.kwargs or len(node.args) != 1:
            return None
        return "call_method", "to", (node.args[0], dtype), {}

    return spell


def _type_as(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., other=...)
    if found and isinstance(found[1], Node) and (dtype := dtype_of(found[1])) is not None:
        return "call_method", "to", (found[0], dtype), {}
    return None


def _joined(target: Callable) -> Spell:
    """`torch.cat` and `torch.stack`: the tensors in a tuple."""

    def spell(node: Node) -> Spelling | None:
        found = _arguments(node, tensors=..., dim=0)
        return None if found is None else ("call_function", target, (tuple(found[0]), found[1]), {})

    return spell


#: attributes that are views: Dynamo of torch 2.15 records the operation, older ones the attribute
_ATTRIBUTES = {
    "T": torch.ops.aten.numpy_T,
    "mT": torch.ops.aten.mT,
    "H": torch.ops.aten.matrix_H,
    "mH": torch.ops.aten.mH,
}


def _attribute(name: str) -> Spell:
    return lambda node: ("call_function", getattr, (node.args[0], name), {})


#: ways to transpose a matrix -> their arguments (negative dims are left out: models use them for batches of matrices)
_TRANSPOSES: dict[Any, tuple] = {
    getattr: (("T",),),
    "t": ((),),
    torch.t: ((),),
    **dict.fromkeys(("transpose", torch.transpose), ((0, 1), (1, 0))),
    "permute": ((1, 0), ((1, 0),)),
}


def _transposed(node: Any) -> Node | None:
    """The matrix of which this node is the transpose. (In a pattern, shapes are unknown, and the spelling decides.)"""
    if not isinstance(node, Node) or node.kwargs or node.args[1:] not in _TRANSPOSES.get(node.target, ()):
        return None
    matrix = value(node.args[0])
    is_matrix = matrix is None or (isinstance(matrix, torch.Tensor) and matrix.dim() == 2)
    return node_arg(node, 0) if is_matrix else None


def _product(node: Node) -> Spelling | None:
    """Spell a product with a transposed matrix as a linear, which is how torch computes one without bias."""
    turned = node.args[1] if len(node.args) == 2 and not node.kwargs else None
    weight = _transposed(turned)
    # a transpose that was taken under no_grad requires no gradient, even where the matrix does
    if weight is None or not isinstance(turned, Node) or _barrier_between(turned, node):
        return None
    return "call_function", linear, (node.args[0], weight, None), {}


def _barrier_between(first: Node, last: Node) -> bool:
    while last is not first and not is_barrier(last):
        last = last.prev
    return last is not first


def _rms_norm(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., normalized_shape=..., weight=None, eps=None)
    if found is None:
        return None
    if found[3] is None and (dtype := dtype_of(found[0])) is not None:
        found[3] = torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # of the arithmetic, not of the tensor
    return "call_function", F.rms_norm, tuple(found), {}


def _layer_norm(node: Node) -> Spelling | None:
    """By position, whether it was called with `torch.layer_norm`, which may end in the use of cuDNN, or without."""
    own = {} if node.target is F.layer_norm else {"cudnn_enable": True}
    found = _arguments(node, input=..., normalized_shape=..., weight=None, bias=None, eps=1e-5, **own)
    return None if found is None else ("call_function", F.layer_norm, tuple(found[:5]), {})


def _activation(target: Callable) -> Spell:
    def spell(node: Node) -> Spelling | None:
        found = _arguments(node, input=..., inplace=False)
        return None if not found or found[1] else ("call_function", target, (found[0],), {})

    return spell


def _gelu(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., approximate="none")
    if found is None:
        return None
    return "call_function", F.gelu, (found[0],), {} if found[1] == "none" else {"approximate": found[1]}


def _dropout(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., p=0.5, training=True, inplace=False)
    return None if not found or found[3] else ("call_function", F.dropout, tuple(found[:3]), {})


def _reshape(node: Node) -> Spelling | None:
    """Spell reshapes of pairs, as rotary embeddings use them, by the dims that they join or split.

    One that joins the last two dims of a stack, or of complex numbers' parts, flattens; one that splits the last dim
    into such parts unflattens. Other reshapes keep their spelling."""
    source = node_arg(node, 0)
    before, after = value(source), value(node)
    if source is None or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    pairs_joined = (*before.shape[:-2], before.shape[-2] * before.shape[-1]) if before.dim() > 1 else None
    if source.target in (torch.stack, torch.view_as_real) and tuple(after.shape) == pairs_joined:
        return "call_method", "flatten", (source, -2, -1), {}
    to_complex = any(user.target is torch.view_as_complex for user in node.users)
    if to_complex and tuple(after.shape) == (*before.shape[:-1], before.shape[-1] // 2, 2):
        return "call_method", "unflatten", (source, -1, (-1, 2)), {}
    return None


_flatten = _in_order("call_method", "flatten", input=..., start_dim=0, end_dim=-1)
_chunk = _in_order("call_function", torch.chunk, input=..., chunks=..., dim=0)
_unsqueeze = _in_order("call_method", "unsqueeze", input=..., dim=...)

#: target of a node -> function that returns its canonical op, target, args and kwargs; None to leave it unchanged
TABLE: dict[Any, Spell] = {}
for _table, _make in ((_BINARY, _binary), (_UNARY, _unary)):
    for _target, _names in _table.items():
        TABLE.update({name: _make(_target) for name in (_target, *_names)})
TABLE.update({name: _cast(dtype) for name, dtype in _CASTS.items()})
TABLE.update(
    {
        "square": _square,
        torch.square: _square,
        "mean": _mean,
        torch.mean: _mean,
        "to": _to,
        "type": _to,
        "type_as": _type_as,
        torch.cat: _joined(torch.cat),
        torch.concat: _joined(torch.cat),
        linear: _in_order("call_function", linear, input=..., weight=..., bias=None),
        F.silu: _activation(F.silu),
        F.gelu: _gelu,
        F.dropout: _dropout,
        F.rms_norm: _rms_norm,
        torch.rms_norm: _rms_norm,
        F.layer_norm: _layer_norm,
        torch.layer_norm: _layer_norm,
        F.relu: _activation(F.relu),
        torch.relu: _activation(F.relu),
        "relu": _activation(F.relu),
        torch.stack: _joined(torch.stack),
        operator.getitem: slice_of_item,
        "flatten": _flatten,
        torch.flatten: _flatten,
        **dict.fromkeys(("reshape", "view", "view_as", "reshape_as", torch.reshape), _reshape),
        **dict.fromkeys((operator.matmul, torch.matmul, torch.mm, "matmul", "mm"), _product),
        **{operation: _attribute(name) for name, operation in _ATTRIBUTES.items()},
        "chunk": _chunk,
        torch.chunk: _chunk,
        "unsqueeze": _unsqueeze,
        torch.unsqueeze: _unsqueeze,
    }
)


def canonicalize(gm: GraphModule) -> None:
    """Give every node its canonical spelling, and remove casts and dropout that change nothing.

    Args:
        gm: a graph from Dynamo, changed in place. Bodies of checkpoints and autograd functions are respelled, too.
    """
    for child in gm.children():
        if isinstance(child, GraphModule):
            canonicalize(child)
    join_written(gm.graph)
    canonicalize_graph(gm.graph)
    gm.recompile()


def canonicalize_graph(graph: Graph) -> None:
    """Do the same for one `graph`, without the bodies that its nodes call."""
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if (same := _identity(node)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            continue
        spell = TABLE.get(node.target)
        if spell is not None and (spelling := spell(node)) is not None:
            given = [each for each in node.all_input_nodes if _transposed(each) is not None or _scaled(each, node)]
            node.op, node.target, node.args, node.kwargs = spelling
            for source in given:
                if not source.users:
                    graph.erase_node(source)
            if (same := _identity(node)) is not None:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
    drop_clones(graph)


def drop_clones(graph: Graph) -> None:
    """Remove clones that only arithmetic reads, before anything is mutated: PEFT clones 4-bit results "defensively".

    A clone with other users stays: they may return its memory, and a caller who then mutates a region's result must not
    mutate a second one with it. So does one with a mutation between it and what reads it, which may be of what was
    cloned. (Routers mutate their scores in many models, far behind.)

    Args:
        graph: of any dialect. It is changed in place.
    """
    mutations = 0
    before = {}  #: node -> how many mutations stand before it
    for node in graph.nodes:
        before[node] = mutations
        mutations += is_mutation(node)
    for node in list(graph.nodes):
        if node.target not in ("clone", torch.clone) or len(node.args) != 1 or node.kwargs:
            continue
        arithmetic = all(user.target in _BINARY or user.target in _UNARY for user in node.users)
        if arithmetic and all(before[user] == before[node] for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _identity(node: Node) -> Node | None:
    """The input of a cast to the same dtype, or of dropout without effect; None for other nodes."""
    if node.op == "call_method" and node.target == "to" and len(node.args) == 2:
        same = isinstance(node.args[1], torch.dtype) and dtype_of(node.args[0]) == node.args[1]
        return node_arg(node, 0) if same else None
    found = _arguments(node, input=..., p=0.5, training=True, inplace=False) if node.target is F.dropout else None
    if found is None or not isinstance(found[0], Node):
        return None
    return found[0] if found[1] == 0 or found[2] is False else None
