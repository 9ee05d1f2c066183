"""Attention that a model's code writes out, under any mask or bias: torch's own function, which keeps no scores.

Masks of documents have gone before (`document_attention`). Here masks are added, or filled in, as the model's code has
it: additive masks, ALiBi, learned biases (T5), with their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from tunecompile.compiler.attention_calls import LOWEST, FoundAttention, Term, leave_out_weights, written_out_attention
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import DISTURBED, first_of, is_disturbed
from tunecompile.ir.rewrite import erase_dead, replace

__all__ = ["PASS"]

_FAMILY = "attention"


def run(graph: Graph, context: Context) -> None:
    tally = context.tally(_FAMILY)
    for node, found in written_out_attention(graph, context.weights_unread).items():
        if tally.judge(found if isinstance(found, str) else _rewrite(graph, node, found), node):
            assert isinstance(found, FoundAttention)
            leave_out_weights(graph, found)
            erase_dead(graph, [node, *found.inside])


def _refuse(node: Node, found: FoundAttention) -> str | None:
    call, made = found.arguments, value(node)
    if call.sinks is not None or call.softcap:
        return f"{'soft-capped scores' if call.softcap else 'sinks'} under a mask that is not of documents"
    if is_disturbed(first_of(node.graph, found.inside), node):
        return DISTURBED
    operands = (call.query, call.key, call.value)
    q, k, v = (_stands(value(each), order, found.heads) for each, order in zip(operands, found.orders))
    if q.shape[:2] != k.shape[:2] or k.shape[:2] != v.shape[:2] or not made.is_floating_point():
        return "heads of queries, keys and values differ in number"
    for term in found.terms:
        given = value(term.mask)
        if not isinstance(given, Tensor) or not 2 <= given.dim() <= 4:
            return "a mask that is no tensor of two to four dimensions"
        if term.joined and (found.heads == 0 or given.dim() == 4):
            return "a mask stands otherwise than scores do"
        if term.fill is not None and given.dtype != torch.bool:
            return f"a mask of {given.dtype} says where scores are filled"
        if term.fill is None and not given.is_floating_point():
            return f"a mask of {given.dtype} is added"
    return None


def _rewrite(graph: Graph, node: Node, found: FoundAttention) -> str | None:
    if reason := _refuse(node, found):
        return reason
    call, dtype = found.arguments, value(node).dtype
    operands = (call.query, call.key, call.value)
    casts = any(value(each).dtype != dtype for each in operands)
    shapes = [value(term.mask) for term in found.terms]
    *orders, back = found.orders

    def by_torch(query: Any, key: Any, values: Any, masks: Any) -> Any:
        rows = [_stands(x, order, found.heads) for x, order in zip((query, key, values), orders)]
        rows = [x.to(dtype) for x in rows] if casts else rows  # as autocast would
        stand = [_mask_stands(mask, term, given, found.heads) for mask, term, given in zip(masks, found.terms, shapes)]
        mask = plain = _joined(stand, shapes, found.terms, dtype)
        if mask is not None:  # a row that sees nothing weighs all keys alike, and kernels could not tell how many
            if any(term.factor != 1 for term in found.terms):
                mask = _joined(stand, shapes, found.terms, dtype, scaled=True)
            sees = (plain > LOWEST / 2).any(-1, keepdim=True)
            rows[0], mask = torch.where(sees, rows[0], 0.0), torch.where(sees, mask, 0.0)
        made = F.scaled_dot_product_attention(*rows, attn_mask=mask, scale=float(call.scale))
        made = made.permute(back) if back else made
        return made.flatten(0, 1) if found.heads else made

    bound = {"query": call.query, "key": call.key, "values": call.value, "masks": [term.mask for term in found.terms]}
    return replace(graph, (node,), by_torch, bound)


def _stands(x: Any, order: Sequence[int] | None, heads: int) -> Any:
    """An operand as [rows, heads, tokens, width]."""
    x = x.permute(order) if order else x
    return x.unflatten(0, (-1, heads)) if heads else x


def _mask_stands(mask: Any, term: Term, given: Tensor, heads: int) -> Any:
    """What is done to scores [rows, heads, tokens, keys], in four dimensions."""
    if term.joined and given.dim() == 3 and given.shape[0] != 1:
        return mask.unflatten(0, (-1, heads))
    return mask[(None,) * (4 - given.dim())] if given.dim() < 4 else mask


def _joined(
    masks: list[Any], shapes: list[Tensor], terms: Sequence[Term], dtype: torch.dtype, scaled: bool = False
) -> Any:
    """One mask to add, in the dtype of the product, in which a number that masks does not become infinite."""
    total, wide, summed = None, dtype, torch.promote_types(dtype, torch.float32)
    for mask, shape, term in zip(masks, shapes, terms):
        factor = term.factor if scaled else 1
        if term.fill is None:
            wide = shape.dtype if len(masks) == 1 and factor == 1 else summed
            mask = mask if factor == 1 else (mask if shape.dtype == wide else mask.to(wide)) * factor
            total = mask if total is None else total + mask
        else:
            number = max(term.fill * factor, torch.finfo(dtype).min, torch.finfo(torch.float32).min)
            before, wide = (0.0, torch.float32) if total is None else (total, summed)
            total = torch.where(mask, before, number) if term.keeps else torch.where(mask, number, before)
    if total is None or wide == dtype:
        return total
    fits = torch.promote_types(wide, dtype) == dtype
    least = max(torch.finfo(dtype).min, torch.finfo(wide).min)
    return total.to(dtype) if fits else total.clamp(min=least).to(dtype)


PASS = Pass(_FAMILY, "recognize", run)
