"""Attention under a document mask becomes `varlen_attention`, which reads offsets instead of the mask,
`branch_attention` where documents go on from others, or `dropout_attention` where weights have dropout.

Padded and packed batches reach a layer as one row of documents, and images reach a tower as one row of patches. The
mask is the op `document_mask`. Attention that reads it, and does nothing else with it, is replaced.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from tunecompile.compiler.attention_calls import (
    AttentionArguments,
    attention_calls,
    document_mask_of,
    leave_out_weights,
    unrepeated_pair,
    views_behind,
)
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.compiler.token_wise.graph import is_tree, not_by_documents
from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import DISTURBED, first_of, is_disturbed
from tunecompile.ir.rewrite import erase_dead, replace
from tunecompile.ops import branch_attention, dropout_attention, varlen_attention

__all__ = ["PASS"]

_FAMILY = "document_attention"
_SEEDS = 2**31 - 1


def run(graph: Graph, context: Context) -> None:
    tally = context.tally(_FAMILY)
    for node, found in attention_calls(graph, context.weights_unread).items():
        call, mask = found.arguments, document_mask_of(found.arguments.mask)
        assert mask is not None
        if is_disturbed(first_of(graph, {node, *found.inside}), node):
            reason: Any = DISTURBED
        else:
            reason = not_by_documents(call.map(value), is_tree(mask)) or _rewrite(graph, node, call, mask)
        if tally.judge(reason, node):
            leave_out_weights(graph, found)
            views = (view for given in (call.mask, call.key, call.value) for view in views_behind(given))
            erase_dead(graph, [node, *found.inside, *views])


def _rewrite(graph: Graph, node: Node, call: AttentionArguments, mask: Node) -> str | None:
    offsets, longest, _, window, *rest = mask.args
    causal, tree, places = (*rest, *(True, None, None)[len(rest) :])
    dtype, width, made_wide = value(node).dtype, value(call.query).shape[-1], value(call.value).shape[-1]
    joint = max(width, made_wide)
    softcap, dropout = float(call.softcap), float(call.dropout)
    casts = value(call.query).dtype != dtype
    scale = width**-0.5 if call.scale is None else call.scale

    def by_documents(
        query: Any, key: Any, value: Any, offsets: Any, longest: Any, sinks: Any, tree: Any, places: Any
    ) -> Any:
        rows = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
        rows = [x.to(dtype) for x in rows] if casts else rows  # as autocast would
        # zeros change neither scores nor results
        rows = [x if w == joint else F.pad(x, (0, joint - w)) for x, w in zip(rows, (width, width, made_wide))]
        if dropout:  # a seed of each call, which the graph draws and saves
            seed = torch.randint_like(offsets[:1], _SEEDS, dtype=torch.int64)
            made = dropout_attention(*rows, offsets, longest, scale, window, causal, dropout, seed)[0]
        elif tree is None:
            made = varlen_attention(*rows, offsets, longest, scale, window, sinks, causal, softcap)[0]
        else:
            made = branch_attention(*rows, offsets, longest, tree, places, scale, window, sinks, softcap)[0]
        made = made if made_wide == joint else made[..., :made_wide]
        return made.transpose(0, 1).unsqueeze(0)

    key, val = unrepeated_pair(call)
    bound = {"query": call.query, "key": key, "value": val, "offsets": offsets, "longest": longest}
    bound |= {"sinks": call.sinks, "tree": tree, "places": places}
    return replace(graph, (node,), by_documents, bound)


PASS = Pass(_FAMILY, "recognize", run)
