"""Attention that is written out: scores, softmax and product apart.

It may have sinks, as gpt-oss has them: a learned number for each head that stands beside the scores in the softmax, and
has no value (arXiv:2309.17453 keeps tokens for it). Or its result is scaled by them, which is the same
(`scaled_by_sinks`).
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from tunecompile.compiler.attention_calls.found import LOWEST, AttentionArguments, FoundAttention, Term
from tunecompile.compiler.attention_calls.products import scored, weighted
from tunecompile.compiler.attention_calls.reading import (
    Reading,
    asked,
    calls,
    casts,
    casts_or_regroups,
    is_all_but_last,
    is_last,
    is_number,
    keeps_all,
)
from tunecompile.compiler.attention_calls.scaled_by_sinks import read_sinks, scaled_by_sinks
from tunecompile.ir.canonicalize import value


def written_out_attention(graph: Graph, unread: bool = False) -> dict[Node, FoundAttention | str]:
    """Attention that a model's code writes out, by the node of its result; or why it is none that is understood.

    unread: whether weights that are a result of the graph are not read.
    """
    found: dict[Node, FoundAttention | str] = {}
    for node in graph.nodes:
        outer = weighted(node)
        if outer is not None and (weights := _softmax_of(outer.left)) is not None:
            scaled = next((user for user in node.users if calls(user, "mul") and read_written_out(user, unread)), node)
            call = read_written_out(scaled, unread)
            found[scaled] = call or (_RETURNED if _is_returned(outer.left) else _WHY[weights])
    return found


_WHY = {
    "dropout": "its weights have dropout",
    "softmax": "its scores are more than a product, a factor and masks, or are read elsewhere too",
}


_RETURNED = "the layer returns its weights"


def _is_returned(weights: Any) -> bool:
    """Whether the weights, or what they were before casts, are a result of the graph."""
    while isinstance(weights, Node):
        if any(user.op == "output" for user in weights.users):
            return True
        weights = weights.args[0] if keeps_all(weights) else None
    return False


def _softmax_of(node: Any) -> str | None:
    """Whether weights are a softmax over three or four dimensions, or dropout of one."""
    name = "softmax"
    while isinstance(node, Node) and (keeps_all(node) or calls(node, "dropout")):
        name = name if keeps_all(node) else "dropout"
        node = node.args[0]
    made = value(node) if calls(node, "softmax") else None
    return name if isinstance(made, Tensor) and made.dim() in (3, 4) else None


def read_written_out(node: Node, unread: bool = False) -> FoundAttention | None:
    """softmax(scale q k^T + masks) v, of which nothing else is read."""
    read = Reading()
    scaled = scaled_by_sinks(node, read)
    around = len(read.inside)
    if (outer := weighted(scaled.product if scaled else node)) is None:
        return None
    weights: Any = read.through(outer.left, keeps_all)
    column = is_all_but_last(weights)
    weights = read.step(weights) if column else weights
    if not (calls(weights, "softmax") and is_last(asked(weights, "dim", 1), weights)):
        return None
    final = {weights, *read.inside[around:]}
    scores: Any = read.through(read.step(weights), casts)
    if scaled and (column or scaled.scores is not scores):
        return None
    if not scaled:  # by which sinks are compared with scores as they are
        scores = read.through(_without_maximum(scores, read), casts_or_regroups)
    sinks = scaled.sinks if scaled else None
    if column:
        if not (calls(scores, "cat") and asked(scores, "dim", 1) in (-1, 3) and len(scores.args[0]) == 2):
            return None
        read.inside.append(scores)
        scores, beside = scores.args[0]
        sinks = read_sinks(beside, read, 2)
        scores = read.through(scores, casts)
    terms, products, factor = _terms(scores, read)
    products, softcap = _without_cap(products, read) if factor == 1 else (products, 0.0)
    products, scale = _without_factor(products, read)
    inner = scored(products, factor * scale, read)
    if inner is None or (softcap and inner.added):
        return None
    call = AttentionArguments(inner.left, inner.right, outer.right, None, 0.0, False, inner.factor, sinks, softcap)
    found = FoundAttention(call, terms=inner.added + terms, orders=(*inner.orders, *outer.orders))
    return _whole(node, found, read, final, column or scaled is not None, unread)


def _whole(
    node: Node, found: FoundAttention, read: Reading, weights: set[Node], sinks: bool, unread: bool
) -> FoundAttention | None:
    """What was found, if its operands fit together, and nothing between them is read elsewhere."""
    call = found.arguments
    given = [value(each) if isinstance(each, Node) else None for each in (call.query, call.key, call.value)]
    ranks = {each.dim() if isinstance(each, Tensor) else 0 for each in given}
    if ranks not in ({3}, {4}):
        return None
    outside = [(each, user) for each in read.inside for user in each.users if user not in {*read.inside, node}]
    returned = tuple({each: None for each, user in outside if user.op == "output" and each in weights})
    if any(user.op != "output" or each not in weights for each, user in outside) or (returned and not unread):
        return None
    plain = not any(found.orders)
    if returned and not (plain and all(value(each).dim() == 4 for each in returned)):
        return None
    if sinks and not (
        plain and call.sinks is not None and tuple(value(call.sinks).shape) == value(call.query).shape[1:2]
    ):
        return None
    heads = (read.heads or 1) if ranks == {3} else 0
    terms, mask = found.terms, None
    if len(terms) == 1 and plain and not heads and terms[0] == Term(terms[0].mask):
        mask = terms[0].mask
    inside = frozenset(read.inside)
    return replace(found, arguments=replace(call, mask=mask), inside=inside, heads=heads, returned=returned)


def _terms(scores: Any, read: Reading) -> tuple[tuple[Term, ...], Any, float]:
    """(what is done to scores, first to last; the scores before; their factor, which terms have as well)."""
    terms: list[Term] = []
    factor = 1.0
    while isinstance(scores, Node) and not scores.kwargs:
        given: tuple[Any, ...] = tuple(scores.args)
        joined = getattr(value(scores), "ndim", 0) == 3
        if calls(scores, "add") and len(given) == 2 and isinstance(value(given[1]), Tensor):
            before, mask = given if _has_shape(given[0], scores) else reversed(given)
            terms.append(Term(mask, factor=factor, joined=joined))
            read.inside.append(scores)
            scores = read.through(before, casts_or_regroups)
            continue
        elif calls(scores, "masked_fill") and len(given) == 3 and _masks(given[2], factor):
            terms.append(Term(given[1], _number(given[2]), factor=factor, joined=joined))
        elif calls(scores, "where") and len(given) == 3 and _masks(given[2], factor) and isinstance(given[1], Node):
            terms.append(Term(given[0], _number(given[2]), True, factor, joined))
            read.inside.append(scores)
            scores = read.through(given[1], casts_or_regroups)
            continue
        elif calls(scores, "mul", "truediv", "div") and not any(calls(each, "tanh") for each in given):
            before, more = _without_factor(scores, read)
            if before is scores:
                break
            factor, scores = factor * more, read.through(before, casts_or_regroups)
            continue
        else:
            break
        scores = read.through(read.step(scores), casts_or_regroups)
    return tuple(reversed(terms)), scores, factor


def _has_shape(given: Any, made: Node) -> bool:
    """Whether an operand has the result's shape: scores have, and a mask that is added to them may be smaller."""
    return isinstance(value(given), Tensor) and str(value(given).shape) == str(value(made).shape)


def _number(given: Any) -> Any:
    """A number, also one that was made a tensor (GPT-Neo); else what was given."""
    while isinstance(given, Node) and (given.target is torch.tensor or casts(given)):
        given = given.args[0]
    return float(given) if isinstance(given, (int, float)) and is_number(given) else given


def _masks(given: Any, factor: float) -> bool:
    """Whether scores of that number, times a factor, count for nothing."""
    number = _number(given)
    return isinstance(number, float) and number <= LOWEST and number * factor <= LOWEST


def _without_factor(node: Any, read: Reading) -> tuple[Any, float]:
    """(what a number multiplies, or divides; the factor)."""
    if not calls(node, "mul", "truediv", "div") or node.kwargs:
        return node, 1.0
    scores, factor = node.args
    if calls(node, "mul"):
        scores, factor = (scores, factor) if is_number(factor) else (factor, scores)
    elif is_number(factor) and factor != 0:
        factor = 1 / factor
    else:
        return node, 1.0
    if not is_number(factor) or not isinstance(scores, Node):
        return node, 1.0
    read.inside.append(node)
    return scores, factor


def _without_cap(node: Any, read: Reading) -> tuple[Any, float]:
    """(scores before a soft-cap, c of c tanh(scores / c)); 0 where there is none."""
    if not calls(node, "mul") or node.kwargs:
        return node, 0.0
    bent, cap = reversed(node.args) if is_number(node.args[0]) else node.args
    if not (calls(bent, "tanh") and is_number(cap)):
        return node, 0.0
    within = bent.args[0]
    divided = calls(within, "truediv", "div") and not within.kwargs and within.args[1] == cap
    if not divided or cap <= 0:
        return node, 0.0
    read.inside += [node, bent, within]
    return within.args[0], float(cap)


def _without_maximum(scores: Any, read: Reading) -> Any:
    """Scores before their maximum was taken from them, which changes no softmax."""
    if not calls(scores, "sub") or len(scores.args) != 2 or scores.kwargs:
        return scores
    source, highest = scores.args
    most: Any = highest.args[0] if isinstance(highest, Node) and highest.target is operator.getitem else highest
    taken = calls(most, "max", "amax") and most.args[0] is source and asked(most, "dim", 1) in (-1, 3)
    taken = taken and asked(most, "keepdim", 2) is True  # else it is that of other queries
    if not taken or (most is not highest and highest.args[1] != 0) or (most is highest and calls(most, "max")):
        return scores
    read.inside += [scores, *{most, highest}]
    return source
