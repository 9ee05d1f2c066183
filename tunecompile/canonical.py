"""One spelling for each operation, so that a pattern need not know whether the model wrote x.float() or x.to(torch.float32).

The table maps what Dynamo records to a function that returns the canonical (op, target, args, kwargs). Patterns pass through
the same table, so whatever is spelled the same way here is the same thing to the matcher.
"""

from __future__ import annotations

import operator
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

Spelling = tuple[str, Any, tuple, dict]

#: binary operations: method, function and operator all become the operator
_BINARY = {
    operator.add: ("add", torch.add), operator.sub: ("sub", torch.sub), operator.mul: ("mul", torch.mul, torch.multiply, "multiply"),
    operator.truediv: ("div", torch.div, "true_divide", torch.true_divide), operator.pow: ("pow", torch.pow),
}
_UNARY = {
    operator.neg: ("neg", torch.neg, "negative"), torch.rsqrt: ("rsqrt",), torch.sqrt: ("sqrt",), torch.tanh: ("tanh", F.tanh),
    torch.sigmoid: ("sigmoid", F.sigmoid),
}
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def value(node: Any) -> Any:
    """The fake value Dynamo recorded for a node, or the constant itself."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def dtype_of(node: Any) -> torch.dtype | None:
    return getattr(value(node), "dtype", None)


def _binary(target: Callable) -> Callable[[Node], Spelling | None]:
    def spell(node: Node) -> Spelling | None:
        if node.kwargs or len(node.args) != 2:  # alpha=, rounding_mode=, out=: another operation
            return None
        left, right = node.args
        if target is operator.mul and left is right and isinstance(left, Node):
            return "call_function", operator.pow, (left, 2), {}
        return "call_function", target, (left, right), {}

    return spell


def _unary(target: Callable) -> Callable[[Node], Spelling | None]:
    def spell(node: Node) -> Spelling | None:
        return None if node.kwargs or len(node.args) != 1 else ("call_function", target, node.args, {})

    return spell


def _square(node: Node) -> Spelling:
    return "call_function", operator.pow, (node.args[0], 2), {}


def _mean(node: Node) -> Spelling | None:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    if dims is None or "dtype" in node.kwargs:
        return None
    dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    return "call_method", "mean", (node.args[0], dims, keepdim), {}


def _to(node: Node) -> Spelling | None:
    rest = list(node.args[1:]) + list(node.kwargs.values())
    keys = set(node.kwargs) - {"dtype"}
    if len(rest) == 1 and not keys and isinstance(rest[0], torch.dtype):
        return "call_method", "to", (node.args[0], rest[0]), {}
    return None


def _cast(dtype: torch.dtype) -> Callable[[Node], Spelling | None]:
    return lambda node: None if node.kwargs or len(node.args) > 1 else ("call_method", "to", (node.args[0], dtype), {})


def _type_as(node: Node) -> Spelling | None:
    if isinstance(node.args[1], Node) and (dtype := dtype_of(node.args[1])) is not None:
        return "call_method", "to", (node.args[0], dtype), {}
    return None


def _cat(node: Node) -> Spelling:
    tensors = node.args[0] if node.args else node.kwargs["tensors"]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return "call_function", torch.cat, (tuple(tensors), dim), {}


def _linear(node: Node) -> Spelling:
    args = list(node.args) + [None] * (3 - len(node.args))
    for i, name in enumerate(("input", "weight", "bias")):
        args[i] = node.kwargs.get(name, args[i])
    return "call_function", F.linear, tuple(args), {}


def _rms_norm(node: Node) -> Spelling:
    names = ("input", "normalized_shape", "weight", "eps")
    args = [node.kwargs.get(name, node.args[i] if i < len(node.args) else None) for i, name in enumerate(names)]
    if args[3] is None and (dtype := dtype_of(args[0])) is not None:
        args[3] = torch.finfo(dtype).eps
    return "call_function", F.rms_norm, tuple(args), {}


def _activation(target: Callable) -> Callable[[Node], Spelling | None]:
    def spell(node: Node) -> Spelling | None:
        if node.kwargs.get("inplace") or len(node.args) > 1:
            return None
        kwargs = {k: v for k, v in node.kwargs.items() if k == "approximate" and v != "none"}
        return "call_function", target, node.args, kwargs

    return spell


def _chunk(node: Node) -> Spelling:
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return "call_function", torch.chunk, (node.args[0], node.args[1], dim), {}


def _unsqueeze(node: Node) -> Spelling:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs["dim"]
    return "call_method", "unsqueeze", (node.args[0], dim), {}


TABLE: dict[Any, Callable[[Node], Spelling | None]] = {}
for _table, _make in ((_BINARY, _binary), (_UNARY, _unary)):
    for _target, _names in _table.items():
        TABLE.update({name: _make(_target) for name in (_target, *_names)})
TABLE.update({name: _cast(dtype) for name, dtype in _CASTS.items()})
TABLE.update({
    "square": _square, torch.square: _square, "mean": _mean, torch.mean: _mean, "to": _to, "type": _to, "type_as": _type_as,
    torch.cat: _cat, torch.concat: _cat, F.linear: _linear, F.silu: _activation(F.silu), F.gelu: _activation(F.gelu),
    F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm,
    "chunk": _chunk, torch.chunk: _chunk, "unsqueeze": _unsqueeze, torch.unsqueeze: _unsqueeze,
})


def canonicalize(gm: GraphModule) -> None:
    """Respell every node in place, drop casts to the dtype a value already has and dropout that drops nothing."""
    for child in gm.children():
        if isinstance(child, GraphModule):  # bodies of checkpoint and autograd-function nodes
            canonicalize(child)
    canonicalize_graph(gm.graph)
    gm.recompile()


def canonicalize_graph(graph: Graph) -> None:
    if not any(is_barrier(node) and not _switches_grad(node) for node in graph.nodes):
        _drop_clones(graph)
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if (same := _identity(node)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            continue
        spell = TABLE.get(node.target)
        if spell is not None and (spelling := spell(node)) is not None:
            node.op, node.target, node.args, node.kwargs = spelling
            if (same := _identity(node)) is not None:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _drop_clones(graph: Graph) -> None:
    """PEFT clones 4-bit results "defensively". Where nothing is mutated, a copy of an inner value is that value."""
    for node in list(graph.nodes):
        clones = node.target in ("clone", torch.clone) and len(node.args) == 1 and not node.kwargs
        if clones and node.args[0].op != "placeholder":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _switches_grad(node: Node) -> bool:
    return node.target is torch._C._set_grad_enabled


def _identity(node: Node) -> Node | None:
    """The node whose value this one repeats, if any."""
    if node.op == "call_method" and node.target == "to" and len(node.args) == 2 and isinstance(node.args[0], Node):
        if isinstance(node.args[1], torch.dtype) and dtype_of(node.args[0]) == node.args[1]:
            return node.args[0]
    if node.target is F.dropout:
        p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        if (p == 0 or training is False) and isinstance(node.args[0], Node):
            return node.args[0]
    return None


def is_barrier(node: Node) -> bool:
    """Whether nothing may be matched across this node: a mutation, or a change of grad or autocast mode."""
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    in_place = name in {"setitem", "iadd", "isub", "imul", "itruediv", "_set_grad_enabled", "_enter_autocast", "_exit_autocast"}
    return in_place or (name.endswith("_") and not name.startswith("_")) or "out" in node.kwargs or node.kwargs.get("inplace") is True
