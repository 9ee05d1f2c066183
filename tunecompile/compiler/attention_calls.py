"""Attention in a graph, however it is written: calls of torch's function, and scores, softmax and product apart.

Written out it may have sinks, as gpt-oss has them: a learned number for each head that stands beside the scores in the
softmax, and has no value (arXiv:2309.17453 keeps tokens for it).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from tunecompile.ir.canonicalize import name_of, value
from tunecompile.ops import document_mask

__all__ = [
    "AttentionArguments",
    "FoundAttention",
    "attention_arguments",
    "attention_calls",
    "document_mask_of",
    "written_out_attention",
]

LOWEST = -65504.0  #: the least number of fp16: what a mask adds to scores that count for nothing, or less


@dataclass(frozen=True)
class AttentionArguments:
    """The arguments of `F.scaled_dot_product_attention`, and sinks: nodes, or their values."""

    query: Any
    key: Any
    value: Any
    mask: Any = None
    dropout: Any = 0.0
    causal: Any = False
    scale: Any = None
    sinks: Any = None  #: [H]
    softcap: Any = 0.0  #: c of c tanh(score / c); 0: none

    def map(self, of: Callable[[Any], Any]) -> AttentionArguments:
        """The same of each argument's `of`."""
        return AttentionArguments(*(of(each) for each in vars(self).values()))


@dataclass(frozen=True)
class FoundAttention:
    """One attention of a graph."""

    arguments: AttentionArguments  #: with a mask where that is all that is done to its scores
    inside: frozenset[Node] = frozenset()  #: calls between its arguments and its result
    #: what is done to scores before the softmax, first to last: (what is added, None) or (where they become, a number)
    terms: tuple[tuple[Node, float | None], ...] = ()


_NAMES = {"attn_mask": "mask", "dropout_p": "dropout", "is_causal": "causal"}


def attention_calls(graph: Graph) -> dict[Node, FoundAttention]:
    """Attention under a document mask, by the node of its result."""
    found = {}
    for node in graph.nodes:
        called = node.target is F.scaled_dot_product_attention
        call = FoundAttention(attention_arguments(node)) if called else _written_out(node)
        if call is not None and document_mask_of(call.arguments.mask) is not None:
            found[node] = call
    return found


def written_out_attention(graph: Graph) -> dict[Node, FoundAttention | str]:
    """Attention that a model's code writes out, by the node of its result; or why it is none that is understood."""
    found: dict[Node, FoundAttention | str] = {}
    for node in graph.nodes:
        if _is(node, "matmul") and len(node.args) == 2 and (weights := _softmax_of(node.args[0])) is not None:
            found[node] = _written_out(node) or (_RETURNED if _is_returned(node.args[0]) else _WHY[weights])
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
        weights = weights.args[0] if _casts_or_keeps_all(weights) else None
    return False


def _softmax_of(node: Any) -> str | None:
    """Whether weights are a softmax over four dimensions, or dropout of one."""
    name = "softmax"
    while isinstance(node, Node) and (_casts_or_keeps_all(node) or _is(node, "dropout")):
        name = name if _casts_or_keeps_all(node) else "dropout"
        node = node.args[0]
    made = value(node) if _is(node, "softmax") else None
    return name if isinstance(made, Tensor) and made.dim() == 4 else None


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
        elif not (_is(mask, "to") and given.is_floating_point()):
            return None
        mask = mask.args[0]
    return mask if isinstance(mask, Node) else None


def _written_out(node: Node) -> FoundAttention | None:
    """softmax(scale q k^T + masks) v, of which nothing else is read."""
    if not _is(node, "matmul") or len(node.args) != 2:
        return None
    read = _Reading()
    weights: Any
    weights, values = node.args
    weights = read.through(weights, _casts_or_keeps_all)
    column = _is_all_but_last(weights)
    weights = read.step(weights) if column else weights
    if not (_is(weights, "softmax") and _asked(weights, "dim", 1) in (-1, 3)):
        return None
    scores: Any = read.through(read.step(weights), _casts)
    scores = read.through(_without_maximum(scores, read), _casts)
    sinks = None
    if column:
        if not (_is(scores, "cat") and _asked(scores, "dim", 1) in (-1, 3) and len(scores.args[0]) == 2):
            return None
        read.inside.append(scores)
        scores, beside = scores.args[0]
        sinks = _sinks(beside, read)
        scores = read.through(scores, _casts)
    terms, products = _terms(scores, read)
    products, softcap = _without_cap(products, read)
    products, scale = _without_factor(products, read)
    if not _is(products, "matmul") or len(products.args) != 2 or not _turned(products.args[1]):
        return None
    read.inside += [products, products.args[1]]
    query, keys = products.args[0], products.args[1].args[0]
    given = [value(each) if isinstance(each, Node) else None for each in (query, keys, values)]
    if not all(isinstance(each, Tensor) and each.dim() == 4 for each in given) or read.is_read_elsewhere(node):
        return None
    if column and (sinks is None or tuple(value(sinks).shape) != (value(query).shape[1],)):
        return None
    alone = terms[0][0] if len(terms) == 1 and terms[0][1] is None else None
    call = AttentionArguments(query, keys, values, alone, 0.0, False, scale, sinks, softcap)
    return FoundAttention(call, frozenset(read.inside), terms)


def _terms(scores: Any, read: _Reading) -> tuple[tuple[tuple[Node, float | None], ...], Any]:
    """(`FoundAttention.terms`, the scores before them)."""
    terms: list[tuple[Node, float | None]] = []
    while isinstance(scores, Node) and not scores.kwargs:
        given: tuple[Any, ...] = tuple(scores.args)
        if _is(scores, "add") and len(given) == 2 and isinstance(value(given[1]), Tensor):
            terms.append((given[1], None))
        elif _is(scores, "masked_fill") and len(given) == 3 and _is_number(given[2]) and given[2] <= LOWEST:
            terms.append((given[1], float(given[2])))
        else:
            break
        scores = read.through(read.step(scores), _casts)
    return tuple(reversed(terms)), scores


def _without_factor(node: Any, read: _Reading) -> tuple[Any, float]:
    """(what a number multiplies, or divides; the factor)."""
    if not (
        _is(node, "mul", "truediv", "div") and len(node.args) == 2 and not node.kwargs and _is_number(node.args[1])
    ):
        return node, 1.0
    factor = node.args[1] if _is(node, "mul") else 1 / node.args[1]
    return read.step(node), factor


def _without_cap(node: Any, read: _Reading) -> tuple[Any, float]:
    """(scores before a soft-cap, c of c tanh(scores / c)); 0 where there is none."""
    if not (_is(node, "mul") and _is(node.args[0], "tanh") and not node.kwargs and _is_number(node.args[1])):
        return node, 0.0
    cap = node.args[1]
    within = node.args[0].args[0]
    divided = _is(within, "truediv", "div") and len(within.args) == 2 and not within.kwargs and within.args[1] == cap
    if not divided or cap <= 0:
        return node, 0.0
    read.inside += [node, node.args[0], within]
    return within.args[0], float(cap)


class _Reading:
    """Calls that were read, from the result upward."""

    def __init__(self) -> None:
        self.inside: list[Node] = []

    def step(self, node: Node) -> Any:
        self.inside.append(node)
        return node.args[0]

    def through(self, node: Any, passes: Callable[[Node], bool]) -> Any:
        while isinstance(node, Node) and node.op in ("call_function", "call_method") and passes(node):
            node = self.step(node)
        return node

    def is_read_elsewhere(self, result: Node) -> bool:
        ours = {*self.inside, result}
        return any(user not in ours for node in self.inside for user in node.users)


def _is(node: Any, *names: str) -> bool:
    called = isinstance(node, Node) and node.op in ("call_function", "call_method") and bool(node.args)
    return called and name_of(node.target) in names


def _is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _asked(node: Node, name: str, position: int) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _casts(node: Node) -> bool:
    return _is(node, "to", "float", "type_as", "type")


def _casts_or_keeps_all(node: Node) -> bool:
    """Whether it is a cast, or dropout that drops nothing."""
    if _is(node, "dropout"):
        return _asked(node, "p", 1) == 0 or _asked(node, "training", 2) is False
    return _casts(node)


def _is_all_but_last(node: Any) -> bool:
    """Whether it leaves out the last column, and nothing else."""
    if not (isinstance(node, Node) and node.target is operator.getitem and isinstance(node.args[1], tuple)):
        return False
    *others, last = node.args[1]
    whole = others == [Ellipsis] or others == [slice(None)] * 3
    return whole and last == slice(None, -1)


def _without_maximum(scores: Any, read: _Reading) -> Any:
    """Scores before their maximum was taken from them, which changes no softmax."""
    if not _is(scores, "sub") or len(scores.args) != 2 or scores.kwargs:
        return scores
    source, highest = scores.args
    most: Any = highest.args[0] if isinstance(highest, Node) and highest.target is operator.getitem else highest
    taken = _is(most, "max", "amax") and most.args[0] is source and _asked(most, "dim", 1) in (-1, 3)
    if not taken or (most is not highest and highest.args[1] != 0) or (most is highest and _is(most, "max")):
        return scores
    read.inside += [scores, *{most, highest}]
    return source


def _sinks(column: Any, read: _Reading) -> Node | None:
    """The numbers [H] of a column [1, H, N, 1] beside the scores."""
    before = len(read.inside)
    sinks = read.through(column, lambda each: _is(each, "expand", "reshape", "view", "unsqueeze"))
    given = value(sinks) if isinstance(sinks, Node) else None
    if not isinstance(given, Tensor) or given.dim() != 1:
        return None
    shapes = [tuple(value(each).shape) for each in read.inside[before:] if value(each).numel() == given.numel()]
    by_head = bool(shapes) and shapes[0][-3:] == (given.shape[0], 1, 1)  # the last view of them before it is expanded
    return sinks if by_head else None


def _turned(node: Any) -> bool:
    if _is(node, "transpose"):
        return {_asked(node, "dim0", 1), _asked(node, "dim1", 2)} in ({2, 3}, {-1, -2}, {2, -1}, {3, -2})
    return isinstance(node, Node) and node.target is getattr and node.args[1] == "mT"
