"""Attention under a document mask: calls of torch's function, or written out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from tunecompile.compiler.attention_calls.found import LOWEST, AttentionArguments, FoundAttention
from tunecompile.compiler.attention_calls.reading import calls, casts
from tunecompile.compiler.attention_calls.written_out import read_written_out, written_out_attention
from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import node_arg
from tunecompile.ir.op import HALF
from tunecompile.ops import document_mask

_NAMES = {"attn_mask": "mask", "dropout_p": "dropout", "is_causal": "causal"}


def attention_calls(graph: Graph, unread: bool = False) -> dict[Node, FoundAttention]:
    """Attention under a document mask, by the node of its result.

    unread: whether weights that are a result of the graph are not read.
    """
    found = {}
    for node in graph.nodes:
        called = node.target is F.scaled_dot_product_attention
        call = FoundAttention(attention_arguments(node)) if called else read_written_out(node, unread)
        call = call if call is None or call.arguments.mask is not None else _with_its_only_mask(call)
        if call is not None and document_mask_of(call.arguments.mask) is not None:
            found[node] = _as_narrow_as_values(call)
    return found


def causal_calls(graphs: Sequence[Graph], causal: bool = True) -> int | None:
    """How many calls of torch's function graphs have, if these are all attention, causal by an argument and no mask.

    causal: False for calls that see all tokens.

    Returns:
        None where any has a mask, or another argument, is written out, or reads other tokens than its queries'.
    """
    calls = [node for graph in graphs for node in graph.nodes if node.target is F.scaled_dot_product_attention]
    if any(written_out_attention(graph) for graph in graphs):
        return None
    for call in map(attention_arguments, calls):
        query, key = (value(each).shape[-2] for each in (call.query, call.key))
        other = str(query) != str(key)  # compared as they are, they would be guards
        if call.mask is not None or call.causal is not causal or other:
            return None
    return len(calls)


def _with_its_only_mask(call: FoundAttention) -> FoundAttention:
    """With the mask that is added before scores get their factor (CodeGen): it leaves out the same keys."""
    if len(call.terms) != 1 or any(call.orders) or call.heads:
        return call
    (term,) = call.terms
    given = value(term.mask)
    added = term.fill is None and isinstance(given, Tensor) and given.is_floating_point()
    if not added or term.factor <= 0 or torch.finfo(given.dtype).min * term.factor > LOWEST:
        return call
    return replace(call, arguments=replace(call.arguments, mask=term.mask))


def _as_narrow_as_values(found: FoundAttention) -> FoundAttention:
    """With queries and keys as they were before they were cast for exact scores, which kernels sum in fp32 anyway."""
    call, narrow = found.arguments, {}
    for name in ("query", "key"):
        wide = getattr(call, name)
        before = wide.args[0] if isinstance(wide, Node) and casts(wide) else None
        if not isinstance(before, Node) or value(wide).dtype is not torch.float32 or value(before).dtype not in HALF:
            return found
        if value(before).dtype != value(call.value).dtype:
            return found
        narrow[name] = before
    unread = {wide for wide in (call.query, call.key) if set(wide.users) <= found.inside}
    return replace(found, arguments=replace(call, **narrow), inside=found.inside | unread)


def attention_arguments(node: Node) -> AttentionArguments:
    """Of a call of torch's function, whether they are given by position or by name."""
    named = {_NAMES.get(name, name): value for name, value in node.kwargs.items() if name != "enable_gqa"}
    return AttentionArguments(*node.args[:6], **named)


def document_mask_of(mask: Any) -> Node | None:
    """The call of `document_mask` that a mask is, or is all of, or says in numbers to add; None of another."""
    while isinstance(mask, Node) and mask.target is not document_mask.overload:
        given = value(mask)
        if not isinstance(given, Tensor):
            return None
        if mask.target is operator.getitem:
            index = mask.args[1] if isinstance(mask.args[1], tuple) else (mask.args[1],)
            if not all(isinstance(each, slice) and not each.start and each.step in (None, 1) for each in index):
                return None
            if tuple(given.shape) != tuple(getattr(value(mask.args[0]), "shape", ())):
                return None
        elif mask.target is torch.where:
            _, kept, left_out, *_ = (*mask.args, None, None)
            if kept != 0 or not isinstance(left_out, (int, float)) or left_out > LOWEST:
                return None
        elif not (calls(mask, "to") and given.is_floating_point()):
            return None
        mask = mask.args[0]
    return mask if isinstance(mask, Node) else None


def unrepeated(node: Node) -> Node:
    """Keys or values before their heads were repeated for grouped queries; else the node itself.

    [B, K, N, D] -> [B, K, 1, N, D] -> [B, K, r, N, D] -> [B, K * r, N, D]
    """
    expanded = node_arg(node, 0) if node.op == "call_method" and node.target == "reshape" else None
    if expanded is None or expanded.op != "call_method" or expanded.target != "expand":
        return node
    apart = node_arg(expanded, 0)
    if apart is None or apart.target is not operator.getitem:
        return node
    heads = node_arg(apart, 0)
    if heads is None or not isinstance(value(heads), torch.Tensor):
        return node
    shape, wide, out = value(heads).shape, value(expanded).shape, value(node).shape
    whole = (slice(None), slice(None), None, slice(None), slice(None))
    if len(shape) != 4 or len(wide) != 5 or len(out) != 4 or apart.args[1] != whole:
        return node
    kept = (wide[0], wide[1], wide[3], wide[4]) == tuple(shape) and out[1] == shape[1] * wide[2]
    return heads if kept and (out[0], *out[2:]) == (shape[0], *shape[2:]) else node


def unrepeated_pair(call: AttentionArguments) -> tuple[Any, Any]:
    """Keys and values, both as `unrepeated` has them, or both as they are given where their heads then differ."""
    key, val = unrepeated(call.key), unrepeated(call.value)
    return (key, val) if value(key).shape[1] == value(val).shape[1] else (call.key, call.value)


def views_behind(node: Any) -> list[Node]:
    """A node, and the nodes of which it is a view."""
    found = []
    while isinstance(node, Node) and node.op != "placeholder" and len(found) < 4:
        found.append(node)
        node = node_arg(node, 0)
    return found
