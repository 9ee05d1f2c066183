"""Attention that a model's code writes out, under any mask or bias: torch's own function, which keeps no scores.

Masks of documents have gone before (`document_attention`). Here masks are added, or filled in, as the model's code has
it: additive masks, ALiBi, learned biases (T5), with their gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from tunecompile.compiler.attention_calls import LOWEST, FoundAttention, written_out_attention
from tunecompile.compiler.pass_manager import Context, MatchCount, Pass
from tunecompile.ir.canonicalize import value
from tunecompile.ir.rewrite import erase_dead, replace, where_from

__all__ = ["PASS"]

_FAMILY = "attention"


def run(graph: Graph, context: Context) -> None:
    tally = MatchCount(_FAMILY)
    for node, found in written_out_attention(graph).items():
        tally.found += 1
        if reason := found if isinstance(found, str) else _rewrite(graph, node, found):
            tally.refused.append(f"{_FAMILY}: {reason}{where_from(node)}")
            continue
        assert isinstance(found, FoundAttention)
        erase_dead(graph, [node, *found.inside])
        tally.rewritten += 1
        tally.places.append(f"{_FAMILY}{where_from(node)}")
    if tally.found:
        context.tallies.append(tally)


def _refuse(node: Node, found: FoundAttention) -> str | None:
    call, made = found.arguments, value(node)
    if call.sinks is not None or call.softcap:
        return f"{'soft-capped scores' if call.softcap else 'sinks'} under a mask that is not of documents"
    q, k, v = (value(each) for each in (call.query, call.key, call.value))
    if q.shape[:2] != k.shape[:2] or k.shape[:2] != v.shape[:2] or not made.is_floating_point():
        return "heads of queries, keys and values differ in number"
    for mask, filled in found.terms:
        given = value(mask)
        if not 2 <= given.dim() <= 4 or (filled is not None and given.dtype != torch.bool):
            return f"a mask of {given.dim()} dimensions, {given.dtype}"
        if filled is None and not given.is_floating_point():
            return f"a mask of {given.dtype} is added"
    return None


def _rewrite(graph: Graph, node: Node, found: FoundAttention) -> str | None:
    if reason := _refuse(node, found):
        return reason
    call, dtype = found.arguments, value(node).dtype
    casts = any(value(each).dtype != dtype for each in (call.query, call.key, call.value))
    filled = [number for _, number in found.terms]
    shapes = [value(mask) for mask, _ in found.terms]

    def by_torch(query: Any, key: Any, values: Any, masks: Any) -> Any:
        rows = [x.to(dtype) for x in (query, key, values)] if casts else [query, key, values]  # as autocast would
        mask = _joined(masks, shapes, filled, dtype)
        if mask is not None:  # a row that sees nothing weighs all keys alike, and kernels could not tell how many
            sees = (mask > LOWEST / 2).any(-1, keepdim=True)
            rows[0], mask = torch.where(sees, rows[0], 0.0), torch.where(sees, mask, 0.0)
        return F.scaled_dot_product_attention(*rows, attn_mask=mask, scale=float(call.scale))

    bound = {"query": call.query, "key": call.key, "values": call.value, "masks": [mask for mask, _ in found.terms]}
    return replace(graph, (node,), by_torch, bound)


def _joined(masks: list[Any], shapes: list[Tensor], filled: list[float | None], dtype: torch.dtype) -> Any:
    """One mask to add, in the dtype of the product, in which a number that masks does not become infinite."""
    total, wide = None, dtype
    for mask, shape, number in zip(masks, shapes, filled):
        mask = mask[(None,) * (4 - shape.dim())] if shape.dim() < 4 else mask
        if number is None:
            total = mask if total is None else total + mask
            wide = shape.dtype if len(masks) == 1 else torch.float32
        else:
            total = torch.where(mask, max(number, torch.finfo(dtype).min), 0.0 if total is None else total)
            wide = torch.float32
    return total if total is None or wide == dtype else total.clamp(min=torch.finfo(dtype).min).to(dtype)


PASS = Pass(_FAMILY, "recognize", run, provides=frozenset({_FAMILY}))
