"""Causal attention of heads that are wider than vendors' fused kernels take, where blocks of queries are faster.

torch has a slow kernel for these, or none: "efficient" (`compiler.attention_backend` measures both). And attention of
one query a row over a cache, for which torch repeats the heads of keys and values; also where a model's code writes it
out, with sinks or soft-capped scores."""

from collections.abc import Callable
from dataclasses import replace as replaced
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from tunecompile.compiler.attention_backend import takes_blocks
from tunecompile.compiler.attention_calls import (
    LOWEST,
    AttentionArguments,
    FoundAttention,
    attention_arguments,
    leave_out_weights,
    read_written_out,
    unrepeated_pair,
    views_behind,
)
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import DISTURBED, first_of, is_disturbed
from tunecompile.ir.rewrite import erase_dead, replace
from tunecompile.ops import causal_attention, one_query_attention

__all__ = ["ONE_QUERY", "PASS"]

_FAMILY = "causal_attention"
_ONE = "one_query_attention"


def run(graph: Graph, context: Context) -> None:
    _rewrite_calls(graph, context, _FAMILY, takes_blocks, _in_blocks)


def _one_query(graph: Graph, context: Context) -> None:
    _rewrite_calls(graph, context, _ONE, _has_one_query, _over_cache)
    tally = context.tally(_ONE)
    for node in list(graph.nodes):
        found = read_written_out(node, context.weights_unread)
        if found is not None and _is_of_one(value(node)) and tally.judge(_written_out(graph, node, found), node):
            leave_out_weights(graph, found)
            erase_dead(graph, [node, *found.inside])


def _rewrite_calls(
    graph: Graph,
    context: Context,
    family: str,
    takes: Callable[[Node], bool],
    rewrite: Callable[[Graph, Node], str | None],
) -> None:
    """Rewrite calls of torch's attention that `takes` accepts. `rewrite` returns why one has to stay."""
    tally = context.tally(family)
    for node in list(graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)):
        if not takes(node):
            continue
        call = attention_arguments(node)
        if tally.judge(rewrite(graph, node), node):
            erase_dead(graph, [node, *views_behind(call.key), *views_behind(call.value)])


def _in_blocks(graph: Graph, node: Node) -> str | None:
    call, dtype = attention_arguments(node), value(node).dtype
    scale = value(call.query).shape[-1] ** -0.5 if call.scale is None else call.scale
    if not isinstance(scale, (int, float)):
        return "a scale that is a tensor"
    key, val = unrepeated_pair(call)
    q, k, v = (value(each).shape for each in (call.query, key, val))
    if str((*k, q[0], q[2])) != str((*v, k[0], k[2])) or q[1] % k[1]:  # compared, sizes would be guards
        return "queries, keys and values differ in rows, tokens or heads"
    casts = any(value(each).dtype != dtype for each in (call.query, key, val))

    def in_blocks(query: Any, key: Any, values: Any) -> Any:
        rows = [x.to(dtype) for x in (query, key, values)] if casts else (query, key, values)  # as autocast would
        return causal_attention(*rows, scale)[0]

    return replace(graph, (node,), in_blocks, {"query": call.query, "key": key, "values": val})


def _is_of_one(made: torch.Tensor) -> bool:
    """Whether this is attention of one query a row: [rows, heads, 1, width]."""
    return made.dim() == 4 and type(made.shape[2]) is int and made.shape[2] == 1


def _has_one_query(node: Node) -> bool:
    return _is_of_one(value(node)) and attention_arguments(node).mask is not None


def _over_cache(graph: Graph, node: Node) -> str | None:
    call = attention_arguments(node)
    return _by_one_query(graph, node, call, {node, *views_behind(call.key), *views_behind(call.value)})


def _written_out(graph: Graph, node: Node, found: FoundAttention) -> str | None:
    if found.heads or any(found.orders) or len(found.terms) != 1 or found.terms[0].joined:
        return "heads or masks stand otherwise"
    (term,) = found.terms
    if term.factor != 1 or (term.fill is not None and not (term.keeps and term.fill <= LOWEST)):
        return "scores are masked otherwise than by a sum"
    if not value(term.mask).is_floating_point() and term.fill is None:
        return f"a mask of {value(term.mask).dtype} is added"
    return _by_one_query(graph, node, replaced(found.arguments, mask=term.mask), {node, *found.inside})


def _by_one_query(graph: Graph, node: Node, call: AttentionArguments, inside: set[Node]) -> str | None:
    dtype = value(node).dtype
    key, val = unrepeated_pair(call)
    q, k, v, mask = (value(each) for each in (call.query, key, val, call.mask))
    if any(x.requires_grad for x in (q, k, v)) or call.dropout:
        return "it has a backward, or dropout"
    masks = mask.dtype == torch.bool or mask.is_floating_point()
    if not masks or mask.dim() != 4 or [str(n) for n in mask.shape[1:3]] != ["1", "1"]:
        return "a mask that is not one for all heads"
    rows, heads, _, width = k.shape  # tokens may be symbols of their own, which the call has to be equal
    if str((*v.shape[:2], v.shape[3], q.shape[0], q.shape[3])) != str((rows, heads, width, rows, width)):
        return "queries, keys and values differ in rows, heads or width"
    if q.shape[1] % heads:
        return "heads of keys do not divide those of queries"
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    if not isinstance(scale, (int, float)):
        return "a scale that is a tensor"
    if is_disturbed(first_of(graph, inside), node):
        return DISTURBED
    casts, softcap = any(x.dtype != dtype for x in (q, k, v)), float(call.softcap)

    def over_cache(query: Any, key: Any, values: Any, mask: Any, sinks: Any) -> Any:
        rows = [x.to(dtype) for x in (query, key, values)] if casts else (query, key, values)  # as autocast would
        return one_query_attention(*rows, mask, scale, sinks, softcap)

    bound = {"query": call.query, "key": key, "values": val, "mask": call.mask, "sinks": call.sinks}
    return replace(graph, (node,), over_cache, bound)


PASS = Pass(_FAMILY, "recognize", run)
ONE_QUERY = Pass(_ONE, "recognize", _one_query)
