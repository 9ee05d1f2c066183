"""Attention weights that a graph returns and nobody reads."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph

from tunecompile.compiler.attention_calls.found import FoundAttention
from tunecompile.ir.canonicalize import value
from tunecompile.ir.rewrite import build_before


def leave_out_weights(graph: Graph, found: FoundAttention) -> None:
    """Return weights of no row for weights that nobody reads (`tunecompile.runtime.layers.unread_weights`)."""
    for weights in found.returned:
        heads, dtype = value(weights).shape[1], value(weights).dtype

        def of_no_row(query: Any, key: Any, heads: int = heads, dtype: Any = dtype) -> Any:
            return query.new_empty((0, heads, query.shape[-2], key.shape[-2]), dtype=dtype)

        end = graph.output_node()
        bound = {"query": found.arguments.query, "key": found.arguments.key}
        _, (none,) = build_before(graph, end, weights, of_no_row, bound)
        end.replace_input_with(weights, none)
