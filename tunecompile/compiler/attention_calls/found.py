"""What is found of attention in a graph: its operands, masks, and how these stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

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
class Term:
    """What is done to scores before the softmax: something is added, or a number filled in."""

    mask: Node  #: what is added; or where the number stands
    fill: float | None = None
    keeps: bool = False  #: whether the mask says where scores stay, and not where the number stands
    factor: float = 1.0  #: of this term, once the factors of all scores are one
    joined: bool = False  #: whether rows and heads are one dimension of it


Order = tuple[int, ...] | None  #: of dimensions, as `permute` takes it; None: as they are


@dataclass(frozen=True)
class FoundAttention:
    """One attention of a graph."""

    arguments: AttentionArguments  #: with a mask where that is all that is done to its scores
    inside: frozenset[Node] = frozenset()  #: calls between its arguments and its result
    terms: tuple[Term, ...] = ()  #: first to last
    heads: int = 0  #: how many there are, where rows and heads are one dimension of all operands
    #: of query, keys and values, to be [rows, heads, tokens, width]; and of the result
    orders: tuple[Order, ...] = (None,) * 4
    returned: tuple[Node, ...] = ()  #: its weights, where they are a result of the graph
