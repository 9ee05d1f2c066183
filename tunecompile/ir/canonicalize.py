"""One spelling for each operation, so that a pattern need not know whether the model wrote x.float() or x.to(torch.float32).

The table maps what Dynamo records to a function that returns the canonical (op, target, args, kwargs). Patterns pass through
the same table, so whatever is spelled the same way here is the same thing to the matcher.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch.modules import linear
from tunecompile.ir.op import HALF

__all__ = ["TABLE", "canonicalize", "dtype_of", "is_barrier", "is_mutation", "name_of", "value"]

Spelling = tuple[str, Any, tuple, dict]

#: binary operations: method, function and operator all become the operator
_BINARY = {
    operator.add: ("add", torch.add),
    operator.sub: ("sub", torch.sub),
    operator.mul: ("mul", torch.mul, torch.multiply, "multiply"),
    operator.truediv: ("div", torch.div, "true_divide", torch.true_divide),
    operator.pow: ("pow", torch.pow),
}
_UNARY = {
    operator.neg: ("neg", torch.neg, "negative"),
    torch.rsqrt: ("rsqrt",),
    torch.sqrt: ("sqrt",),
    torch.tanh: ("tanh", F.tanh),
    torch.sigmoid: ("sigmoid", F.sigmoid),
}
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def value(node: Any) -> Any:
    """What a guard knows of an argument, before autograd.

    Args:
        node: of the recognize stage, or a constant.

    Returns:
        The fake value that Dynamo recorded for the node (None if it did not), or the constant itself.
    """
    return node.meta.get("example_value") if isinstance(node, Node) else node


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of a node's value.

    Args:
        node: of the recognize stage, or a constant.

    Returns:
        Its dtype; None for what is no tensor.
    """
    return getattr(value(node), "dtype", None)


def name_of(target: Any) -> str:
    """What a node calls, in few words.

    Args:
        target: of the node.

    Returns:
        `mul`, `silu`, `to`; an op with its namespace, as `aten.mul`.
    """
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    return (
        target
        if isinstance(target, str)
        else _BINARY[target][0]
        if target in _BINARY
        else getattr(target, "__name__", str(target))
    )


_ALIASES = {"axis": "dim", "keepdims": "keepdim"}  #: numpy's names, which torch takes as well


def _arguments(node: Node, **defaults: Any) -> list | None:
    """The call's arguments in the order of `defaults`, by position or by name; None if it has others, or lacks a needed one (`...`)."""
    given = dict(zip(defaults, node.args))
    named = {_ALIASES.get(name, name): item for name, item in node.kwargs.items()}
    if len(node.args) > len(defaults) or named.keys() - defaults.keys() or named.keys() & given.keys():
        return None
    values = [{**defaults, **given, **named}[name] for name in defaults]
    return None if any(item is ... for item in values) else values


def _binary(target: Callable) -> Callable[[Node], Spelling | None]:
    def spell(node: Node) -> Spelling | None:
        if node.kwargs or len(node.args) != 2:  # alpha=, rounding_mode=, out=: another operation
            return None
        left, right = node.args
        if (
            target is operator.mul and left is right and isinstance(left, Node) and dtype_of(left) not in HALF
        ):  # CUDA's autocast takes powers, alone, in fp32
            return "call_function", operator.pow, (left, 2), {}
        return "call_function", target, (left, right), {}

    return spell


def _unary(target: Callable) -> Callable[[Node], Spelling | None]:
    def spell(node: Node) -> Spelling | None:
        return None if node.kwargs or len(node.args) != 1 else ("call_function", target, node.args, {})

    return spell


def _square(node: Node) -> Spelling | None:
    found = _arguments(node, input=...)
    return found and ("call_function", operator.pow, (found[0], 2), {})


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


def _cast(dtype: torch.dtype) -> Callable[[Node], Spelling | None]:
    return lambda node: None if node.kwargs or len(node.args) > 1 else ("call_method", "to", (node.args[0], dtype), {})


def _type_as(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., other=...)
    if found and isinstance(found[1], Node) and (dtype := dtype_of(found[1])) is not None:
        return "call_method", "to", (found[0], dtype), {}
    return None


def _cat(node: Node) -> Spelling | None:
    found = _arguments(node, tensors=..., dim=0)
    return found and ("call_function", torch.cat, (tuple(found[0]), found[1]), {})


def _linear(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., weight=..., bias=None)
    return found and ("call_function", linear, tuple(found), {})


#: how a matrix is transposed -> with which arguments (those that say "the last two" are used for stacks of matrices)
_TRANSPOSES = {
    getattr: (("T",),),
    "t": ((),),
    torch.t: ((),),
    **dict.fromkeys(("transpose", torch.transpose), ((0, 1), (1, 0))),
    "permute": ((1, 0), ((1, 0),)),
}


def _transposed(node: Any) -> Node | None:
    """The matrix of which this is the transpose. (Of a pattern, which knows no shapes, whatever is spelled so.)"""
    if not isinstance(node, Node) or node.kwargs or node.args[1:] not in _TRANSPOSES.get(node.target, ()):
        return None
    matrix = value(node.args[0])
    return node.args[0] if matrix is None or (isinstance(matrix, torch.Tensor) and matrix.dim() == 2) else None


def _product(node: Node) -> Spelling | None:
    """With a transposed matrix on the right, a linear: that is how torch computes one without bias."""
    turned = node.args[1] if len(node.args) == 2 and not node.kwargs else None
    weight = _transposed(turned)
    if weight is None or _barrier_between(turned, node):  # under no_grad, the transpose of what is trained is not
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
        found[3] = torch.finfo(
            torch.promote_types(dtype, torch.float32)
        ).eps  # that of the arithmetic, not of the tensor
    return "call_function", F.rms_norm, tuple(found), {}


def _activation(target: Callable) -> Callable[[Node], Spelling | None]:
    def spell(node: Node) -> Spelling | None:
        found = _arguments(node, input=..., inplace=False)
        return None if not found or found[1] else ("call_function", target, (found[0],), {})

    return spell


def _gelu(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., approximate="none")
    return found and ("call_function", F.gelu, (found[0],), {} if found[1] == "none" else {"approximate": found[1]})


def _dropout(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., p=0.5, training=True, inplace=False)
    return None if not found or found[3] else ("call_function", F.dropout, tuple(found[:3]), {})


def _stack(node: Node) -> Spelling | None:
    found = _arguments(node, tensors=..., dim=0)
    return found and ("call_function", torch.stack, (tuple(found[0]), found[1]), {})


def _flatten(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., start_dim=0, end_dim=-1)
    return found and ("call_method", "flatten", tuple(found), {})


def _reshape(node: Node) -> Spelling | None:
    """What joins the last two dims of what was stacked, or of complex numbers' parts, flattens; what splits the last dim into such parts unflattens.
    (Other shapes say what they mean.)"""
    source = node.args[0] if node.args else None
    before, after = value(source), value(node)
    if not isinstance(source, Node) or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    if source.target in (torch.stack, torch.view_as_real) and tuple(after.shape) == (
        *before.shape[:-2],
        before.shape[-2] * before.shape[-1],
    ):
        return "call_method", "flatten", (source, -2, -1), {}
    if any(user.target is torch.view_as_complex for user in node.users) and tuple(after.shape) == (
        *before.shape[:-1],
        before.shape[-1] // 2,
        2,
    ):
        return "call_method", "unflatten", (source, -1, (-1, 2)), {}
    return None


def _chunk(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., chunks=..., dim=0)
    return found and ("call_function", torch.chunk, tuple(found), {})


def _unsqueeze(node: Node) -> Spelling | None:
    found = _arguments(node, input=..., dim=...)
    return found and ("call_method", "unsqueeze", tuple(found), {})


#: what a node calls -> (node) -> its canonical op, target, args and kwargs; None to leave it as it is
TABLE: dict[Any, Callable[[Node], Spelling | None]] = {}
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
        torch.cat: _cat,
        torch.concat: _cat,
        linear: _linear,
        F.silu: _activation(F.silu),
        F.gelu: _gelu,
        F.dropout: _dropout,
        F.rms_norm: _rms_norm,
        torch.rms_norm: _rms_norm,
        F.relu: _activation(F.relu),
        torch.relu: _activation(F.relu),
        "relu": _activation(F.relu),
        torch.stack: _stack,
        "flatten": _flatten,
        torch.flatten: _flatten,
        **dict.fromkeys(("reshape", "view", "view_as", "reshape_as", torch.reshape), _reshape),
        **dict.fromkeys((operator.matmul, torch.matmul, torch.mm, "matmul", "mm"), _product),
        "chunk": _chunk,
        torch.chunk: _chunk,
        "unsqueeze": _unsqueeze,
        torch.unsqueeze: _unsqueeze,
    }
)


def canonicalize(gm: GraphModule) -> None:
    """Respell every node in place, drop casts to the dtype a value already has and dropout that drops nothing.

    Args:
        gm: as Dynamo made it. Bodies of checkpoints and autograd functions are respelled too.
    """
    for child in gm.children():
        if isinstance(child, GraphModule):  # bodies of checkpoint and autograd-function nodes
            canonicalize(child)
    canonicalize_graph(gm.graph)
    gm.recompile()


def canonicalize_graph(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if (same := _identity(node)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            continue
        spell = TABLE.get(node.target)
        if spell is not None and (spelling := spell(node)) is not None:
            given = node.all_input_nodes
            node.op, node.target, node.args, node.kwargs = spelling
            for source in given:
                if _transposed(source) is not None and not source.users:
                    graph.erase_node(source)
            if (same := _identity(node)) is not None:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
    if not any(is_mutation(node) for node in graph.nodes):
        _drop_clones(graph)


def _drop_clones(graph: Graph) -> None:
    """PEFT clones 4-bit results "defensively". Where nothing is mutated, a copy that only arithmetic reads is its original.

    (What else reads it may hand on its memory: the caller may change what a region returns, and must not change two things.)
    """
    for node in list(graph.nodes):
        clones = node.target in ("clone", torch.clone) and len(node.args) == 1 and not node.kwargs
        if clones and all(user.target in _BINARY or user.target in _UNARY for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _identity(node: Node) -> Node | None:
    """The node whose value this one repeats, if any."""
    if node.op == "call_method" and node.target == "to" and len(node.args) == 2 and isinstance(node.args[0], Node):
        if isinstance(node.args[1], torch.dtype) and dtype_of(node.args[0]) == node.args[1]:
            return node.args[0]
    if node.target is F.dropout and (found := _arguments(node, input=..., p=0.5, training=True, inplace=False)):
        if (found[1] == 0 or found[2] is False) and isinstance(found[0], Node):
            return found[0]
    return None


_IN_PLACE_NAMES = (
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "ilshift",
    "irshift",
    "imatmul",
    "setitem",
    "delitem",
)
_IN_PLACE = {getattr(operator, name) for name in _IN_PLACE_NAMES}
_IN_PLACE_METHODS = {f"__{name}__" for name in _IN_PLACE_NAMES}


@functools.cache
def _inplace_position(target: Any) -> int | None:
    """Where a function of torch.nn.functional takes `inplace`, if it does."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin has no signature
        return None
    return names.index("inplace") if "inplace" in names else None


def is_mutation(node: Node) -> bool:
    """Whether a node changes a tensor in place.

    Args:
        node: of any graph.

    Returns:
        True for `add_`, `setitem`, `out=`, `inplace=True` and ops whose schema says so.
    """
    if node.op == "call_method":
        return node.target in _IN_PLACE_METHODS or (node.target.endswith("_") and not node.target.endswith("__"))
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
    """Whether nothing may be matched across a node.

    Args:
        node: of the recognize stage.

    Returns:
        True for a mutation, and for a change of grad, inference or autocast mode.
    """
    modes = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode"}
    return is_mutation(node) or (node.op == "call_function" and getattr(node.target, "__name__", "") in modes)
