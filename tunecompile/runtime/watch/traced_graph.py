"""The graphs that a call of a layer runs: told before they run, and compared by what they compute."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from tunecompile.compiler.attention_calls import attention_calls, causal_calls
from tunecompile.compiler.token_wise.graph import hands_on, is_told_of_images, recurrences
from tunecompile.ir.canonicalize import value
from tunecompile.notes import Note

_ATTENTION = str(F.scaled_dot_product_attention)
#: operations that leave tokens apart, whatever their arguments: those of LoRA
_APART = {*map(str, (F.linear, F.dropout, operator.add, operator.mul)), "to"}
_PLAIN = (int, float, str, torch.dtype)


@dataclass(frozen=True, eq=False)
class TracedGraph:
    """One compiled graph of a layer, as Dynamo made it: each is an object of its own."""

    operations: tuple[tuple, ...]  #: in order, each with its constants
    dynamic: bool  #: whether sizes are symbols, in whose place another graph has integers
    hands_on: int = 0  #: how many tensors [1, H, N, D] it returns, if it is one for a row of documents
    causal: int | None = None  #: how many calls of attention are causal without a mask; None where not all are
    both_ways: int | None = None  #: how many see all tokens, without a mask; None where not all do
    by_documents: int = 0  #: how many are under a document mask
    recurrences: int = 0  #: how many of its ops read tokens before each, and no other document's where they are told
    alone: bool = True  #: whether a call of the layer runs no other
    of_images: bool = False  #: whether it is a tower's, and told where images begin
    mixes: Note | None = None  #: why a tower's may read more patches than those of an image

    @classmethod
    def of(cls, gm: GraphModule, mixes: Note | None = None, alone: bool = True) -> TracedGraph:
        """What Dynamo's graph computes, its bodies included; mixes, alone: see there."""
        graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
        nodes = (node for graph in graphs for node in graph.nodes if node.op.startswith("call"))
        calls = tuple((str(node.target), *_constants(node)) for node in nodes if _makes_tensors(node))
        by_documents = sum(len(attention_calls(graph)) for graph in graphs)
        return cls(
            calls,
            any(isinstance(value(node), torch.SymInt) for node in gm.graph.find_nodes(op="placeholder")),
            hands_on(gm),
            causal_calls(graphs),
            causal_calls(graphs, causal=False),
            by_documents,
            sum(map(recurrences, graphs)),
            alone,
            is_told_of_images(gm),
            mixes,
        )

    def computes_as(self, other: TracedGraph) -> bool:
        """Whether both compute the same, under whatever plans. In dynamic graphs symbols take the place of integers."""
        if self.dynamic == other.dynamic:
            return self.operations == other.operations
        return self._without_integers() == other._without_integers()

    def covers(self, other: TracedGraph) -> bool:
        """Whether it has all operations of another, whatever the integers.

        But for calls of attention, and for what adapters do to each token: they may be switched off.
        """
        return all(name in _APART for name, *_ in other._beside_attention() - self._beside_attention())

    def _beside_attention(self) -> Counter[tuple]:
        return Counter(each for each in self._without_integers() if each[0] != _ATTENTION)

    def _without_integers(self) -> list[tuple]:
        return [tuple(each for each in operation if type(each) is not int) for operation in self.operations]


def _makes_tensors(node: Node) -> bool:
    return any(isinstance(value, torch.Tensor) for value in tree_leaves(node.meta.get("example_value")))


def _constants(node: Node) -> list[Any]:
    """Integers as they are, and other plain values as text, in which NaN equals itself."""
    leaves = tree_leaves((node.args, node.kwargs))
    return [leaf if type(leaf) is int else repr(leaf) for leaf in leaves if isinstance(leaf, _PLAIN)]


class _Watch(threading.local):
    met: Callable[[TracedGraph | None], None] | None = None
    last: TracedGraph | None = None


_watch = _Watch()


@contextlib.contextmanager
def watching(met: Callable[[TracedGraph | None], None]) -> Iterator[None]:
    """Inside, `met` is called before each graph that this thread's layers run; with None where one runs eagerly.

    Its error ends the layer's call.
    """
    before, _watch.met = _watch.met, met
    try:
        yield
    finally:
        _watch.met = before


@contextlib.contextmanager
def also_watching(met: Callable[[TracedGraph | None], None]) -> Iterator[None]:
    """As `watching`, beside who watches already."""
    before = _watch.met

    def both(graph: TracedGraph | None) -> None:
        met(graph)
        if before is not None:
            before(graph)

    with watching(both):
        yield


def meet(graph: TracedGraph | None) -> None:
    """Tell who watches that this graph runs next."""
    _watch.last = graph
    if _watch.met is not None:
        _watch.met(graph)


def last_graph() -> TracedGraph | None:
    """The graph that this thread's layers ran last."""
    return _watch.last
