"""Causal attention of heads that are wider than vendors' fused kernels take, where blocks of queries are faster.

torch has a slow kernel for these, or none: "efficient" (`compiler.attention_backend` measures both)."""

from typing import Any

import torch.nn.functional as F
from torch.fx import Graph, Node

from tunecompile.compiler.attention_backend import takes_blocks
from tunecompile.compiler.attention_calls import attention_arguments, unrepeated_pair, views_behind
from tunecompile.compiler.pass_manager import Context, MatchCount, Pass
from tunecompile.ir.canonicalize import value
from tunecompile.ir.rewrite import erase_dead, replace, where_from
from tunecompile.ops import causal_attention

__all__ = ["PASS"]

_FAMILY = "causal_attention"


def run(graph: Graph, context: Context) -> None:
    tally = MatchCount(_FAMILY)
    for node in list(graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)):
        if not takes_blocks(node):
            continue
        if reason := _rewrite(graph, node):
            tally.refuse(f"{_FAMILY}: {reason}{where_from(node)}")
            continue
        call = attention_arguments(node)
        erase_dead(graph, [node, *views_behind(call.key), *views_behind(call.value)])
        tally.rewrote(f"{_FAMILY}{where_from(node)}")
    if tally.found:
        context.tallies.append(tally)


def _rewrite(graph: Graph, node: Node) -> str | None:
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


PASS = Pass(_FAMILY, "recognize", run, provides=frozenset({_FAMILY}))
