"""What a graph with masks computes where these leave nothing out, so that a batch without padding can run by it.

Models give their layers a mask, or none where a batch has no padding: two graphs of one code. Here a graph is read as
what flows from its inputs to its results, operation by operation. A mask of bools that leaves out nothing, or only what
comes behind each token, falls out of that. If all else is that of a graph without the mask, both compute the same.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from tunecompile.compiler.attention_calls.calls import attention_arguments, unrepeated_pair
from tunecompile.compiler.attention_calls.reading import calls
from tunecompile.ir.canonicalize import value

MOST = 2  #: masks of one graph
LARGEST = 4096  #: numbers of a constant that are compared
_ARGUMENT = re.compile(r"l_(args|kwargs)_(\w+)_")  #: how Dynamo names an input that is a layer's argument
_SYMBOL = re.compile(r"\b[su]\d+\b")
_NUMBERS = (int, torch.SymInt, torch.SymBool, torch.SymFloat, torch.Size)


@dataclass(frozen=True)
class NeutralMask:
    """A mask of bools [B or 1, 1, Q or 1, K] that leaves nothing out, as a layer is given it."""

    argument: str | int  #: its name, or position
    causal: bool  #: whether it leaves out what comes behind each token
    rows: bool  #: whether it has a row for each of the batch, and not one for all
    queries: bool  #: whether it has one for each query
    expanded: tuple[int, ...]  #: dimensions whose stride is 0
    #: what has Q and K tokens: an operation's result, by its place among all, or an input, by its name; and where
    sizes: tuple[tuple[int | str, int], tuple[int | str, int]]


@dataclass(frozen=True)
class Flow:
    """What a graph computes where some of its masks leave nothing out."""

    exact: str
    without_numbers: str  #: the same, of sizes that are constants in one graph and symbols in another
    dynamic: bool  #: whether its sizes are symbols
    masks: tuple[NeutralMask, ...] = ()

    def computes_as(self, other: Flow) -> bool:
        """Whether both compute the same."""
        if self.dynamic == other.dynamic:
            return self.exact == other.exact
        return self.without_numbers == other.without_numbers


@dataclass(frozen=True)
class MaskShape:
    """A mask that a batch can be given, by the inputs of its graph."""

    mask: NeutralMask
    #: rows, queries and keys: numbers, or the place of an input, and of its dimension
    sizes: tuple[int | tuple[int, int], ...]

    def of(self, inputs: Sequence[Any]) -> tuple[int, int, int, int]:
        """Its shape in a call with these inputs."""
        rows, queries, keys = (each if isinstance(each, int) else inputs[each[0]].shape[each[1]] for each in self.sizes)
        return rows if self.mask.rows else 1, 1, queries if self.mask.queries else 1, keys


def flows_of(gm: GraphModule) -> tuple[Flow, ...]:
    """What a graph, as Dynamo made it, computes for each way in which its masks may leave nothing out."""
    masks = [node for node in _inputs(gm) if _is_mask(node)]
    if not 0 < len(masks) <= MOST:
        return ()
    ways = itertools.product((None, False, True), repeat=len(masks))
    given = ({mask: causal for mask, causal in zip(masks, way) if causal is not None} for way in ways)
    return tuple(flow for each in given if each and (flow := _flow(gm, each)) is not None)


def masks_instead(gm: GraphModule, known: Sequence[Flow]) -> tuple[Flow, tuple[MaskShape, ...]] | None:
    """What a graph computes, and the masks with which a known one computes the same; None where none does."""
    flow = _flow(gm, {}) if known else None
    other = next((each for each in known if flow is not None and each.computes_as(flow)), None)
    if flow is None or other is None:
        return None
    made = dict(enumerate(_Reader(gm, {}, numbers=True).read().order)) | {node.name: node for node in _inputs(gm)}
    shapes = [shape for mask in other.masks if (shape := _shape(gm, mask, made)) is not None]
    return (flow, tuple(shapes)) if len(shapes) == len(other.masks) else None


def _flow(gm: GraphModule, causal: dict[Node, bool]) -> Flow | None:
    try:
        exact, rough = (_Reader(gm, causal, numbers).read() for numbers in (True, False))
        masks = tuple(map(exact.neutral, causal))
    except _NotUnderstood:
        return None
    return Flow(exact.digest, rough.digest, is_dynamic(gm), masks)


def is_dynamic(gm: GraphModule) -> bool:
    """Whether sizes are symbols."""
    return any(isinstance(value(node), torch.SymInt) for node in _inputs(gm))


def _shape(gm: GraphModule, mask: NeutralMask, made: dict[int | str, Node]) -> MaskShape | None:
    """A mask's sizes in a graph that has none.

    made: operations by their places, and inputs by their names.
    """
    values = [*map(value, _inputs(gm))]
    places = {
        str(n): (at, dim) for at, v in enumerate(values) if isinstance(v, Tensor) for dim, n in enumerate(v.shape)
    }
    rows = next((v.shape[0] for v in values if _is_states(v)), None)
    wanted = [rows, *(value(made[at]).shape[dim] for at, dim in mask.sizes)]
    found = (each if isinstance(each, int) else places.get(str(each)) for each in wanted)
    sizes = [each for each in found if each is not None]
    return MaskShape(mask, tuple(sizes)) if len(sizes) == len(wanted) else None


class _NotUnderstood(Exception):
    """A mask is read by something other than attention, or a constant is too large to compare."""


class _Reader:
    """Reads a graph where masks leave nothing out.

    Args:
        causal: these masks, and whether they leave out what comes behind each token.
        numbers: whether sizes count.
    """

    def __init__(self, gm: GraphModule, causal: dict[Node, bool], numbers: bool):
        self.gm, self.causal, self.numbers = gm, causal, numbers
        self.texts: dict[Node, str] = {}
        self.views: dict[Node, Node] = {}  #: masks by their views, which are all of them
        self.order: list[Node] = []  #: operations
        self.read_with: dict[Node, tuple[tuple[Node, int], tuple[Node, int]]] = {}  #: by mask: what has its Q and K
        self.repeats = {node for each in gm.graph.nodes if _is_attention(each) for node in _repeats(each)}
        inputs = [node for node in _inputs(gm) if isinstance(value(node), Tensor) and node not in causal]
        #: of a symbol, the first input that has it, and where: numbers of symbols differ between graphs
        self.symbols = {str(n): f"{x.name}.{dim}" for x in reversed(inputs) for dim, n in enumerate(value(x).shape)}

    def read(self) -> _Reader:
        """All of it."""
        for node in self.gm.graph.nodes:
            self._look_at(node)
        return self

    @property
    def digest(self) -> str:
        """The same for graphs that do the same in the same order."""
        return _digest([self.texts[node] for node in self.order])

    def neutral(self, mask: Node) -> NeutralMask:
        """What has to be known of a mask to make one of other sizes."""
        if mask not in self.read_with:
            raise _NotUnderstood
        given, ((wide, at), (long, where)) = value(mask), self.read_with[mask]
        rows, heads, queries, keys = map(str, given.shape)
        batch = next((str(v.shape[0]) for v in map(value, _inputs(self.gm)) if _is_states(v)), "")
        expanded = tuple(
            dim for dim, (n, by) in enumerate(zip(given.shape, given.stride())) if by == 0 and str(n) != "1"
        )
        argument = _argument(mask)
        fits = rows in ("1", batch) and heads == "1"
        fits &= queries in ("1", str(value(wide).shape[at])) and keys == str(value(long).shape[where])
        fits &= not self.causal[mask] or (queries != "1" and not {2, 3} & {*expanded})
        if argument is None or not fits or not _is_dense(given, expanded):
            raise _NotUnderstood
        sizes = (self._name(wide), at), (self._name(long), where)
        return NeutralMask(argument, self.causal[mask], rows == batch, queries != "1", expanded, sizes)

    def _name(self, node: Node) -> int | str:
        """The same for what is the same in a graph without masks."""
        if node.op == "placeholder":
            return node.name
        if node not in self.order:
            raise _NotUnderstood
        return self.order.index(node)

    def _look_at(self, node: Node) -> None:
        given = value(node)
        if node in self.causal or (mask := self._mask_of(node)) is not None:
            self.views[node] = node if node in self.causal else mask
        elif node.op != "output" and isinstance(given, _NUMBERS):
            self.texts[node] = self._number(given)
        elif node.op == "placeholder":
            kind = f"{given.dtype} {given.dim()}" if isinstance(given, Tensor) else type(given).__name__
            self.texts[node] = f"{node.name} {kind}"
        elif node.op == "get_attr":
            self.texts[node] = self._constant(node)
        elif (kept := self._kept(node)) is not None:
            self.texts[node] = self.texts[kept]
        else:
            what = self._attention(node) if _is_attention(node) else (node.args, node.kwargs)
            self.texts[node] = _digest([node.op, str(node.target), *self._text(what)])
            if node not in self.repeats:
                self.order.append(node)

    def _mask_of(self, node: Node) -> Node | None:
        """The mask that a node is all of."""
        mask = self.views.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if mask is None or not isinstance(value(node), Tensor) or value(node).dtype is not torch.bool:
            return None
        if [*map(str, value(node).shape)] != [*map(str, value(mask).shape)]:
            return None
        if node.target is operator.getitem:
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            return mask if all(isinstance(i, slice) and not i.start and i.step in (None, 1) for i in index) else None
        return mask if calls(node, "to", "contiguous") else None

    def _kept(self, node: Node) -> Node | None:
        """What a choice by a mask that leaves nothing out always is, if attention alone reads it."""
        if node.target is not torch.where or len(node.args) != 3 or node.args[0] not in self.views:
            return None
        mask, kept = self.views[node.args[0]], node.args[1]
        if not isinstance(kept, Node) or value(kept).dim() != 4 or value(kept).dtype is not value(node).dtype:
            return None
        if self.causal[mask] or not _is_added(node):
            return None
        self.read_with.setdefault(mask, ((kept, 2), (kept, 3)))
        return kept

    def _attention(self, node: Node) -> tuple:
        call = attention_arguments(node)
        key, val = unrepeated_pair(call)
        mask = self.views.get(call.mask) if isinstance(call.mask, Node) else None
        if mask is None:
            return call.query, key, val, call.mask, call.causal, call.dropout, call.scale
        if call.causal:
            raise _NotUnderstood
        self.read_with.setdefault(mask, ((call.query, 2), (key, 2)))
        return call.query, key, val, None, self.causal[mask], call.dropout, call.scale

    def _constant(self, node: Node) -> str:
        found: Any = self.gm
        for name in str(node.target).split("."):
            found = getattr(found, name)
        if isinstance(found, GraphModule):
            return _Reader(found, {}, self.numbers).read().digest
        if not isinstance(found, Tensor) or found.numel() > LARGEST:
            raise _NotUnderstood
        return f"{found.dtype} {tuple(found.shape)} {found.tolist()}"

    def _text(self, given: Any) -> list[str]:
        """All that is in an argument, in order."""
        if isinstance(given, Node):
            if given in self.views:  # by something other than attention
                raise _NotUnderstood
            return [self.texts[given]]
        if isinstance(given, (tuple, list)):
            return ["(", *itertools.chain.from_iterable(map(self._text, given)), ")"]
        if isinstance(given, dict):
            return self._text([*given.items()])
        if isinstance(given, slice):
            return ["slice", *self._text((given.start, given.stop, given.step))]
        return [self._number(given) if type(given) is int else f"{type(given).__name__} {given!r}"]

    def _number(self, given: Any) -> str:
        return _SYMBOL.sub(lambda found: self.symbols.get(found[0], found[0]), str(given)) if self.numbers else "n"


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _inputs(gm: GraphModule) -> list[Node]:
    return [*gm.graph.find_nodes(op="placeholder")]


def _is_mask(node: Node) -> bool:
    given = value(node)
    is_bool = isinstance(given, Tensor) and given.dtype is torch.bool and given.dim() == 4
    return is_bool and _argument(node) is not None


def _argument(node: Node) -> str | int | None:
    """The layer's argument that an input is: its name, or position."""
    found = _ARGUMENT.fullmatch(node.name)
    if found is None:
        return None
    kind, name = found.groups()
    return name if kind == "kwargs" else int(name) if name.isdecimal() else None


def _is_states(given: Any) -> bool:
    return isinstance(given, Tensor) and given.dim() == 3 and given.is_floating_point()


def _is_attention(node: Node) -> bool:
    return node.target is F.scaled_dot_product_attention


def _is_added(node: Node) -> bool:
    """Whether attention alone reads it, as a mask, for which it may be broadcast."""
    return bool(node.users) and all(
        (_is_attention(user) and attention_arguments(user).mask is node and node not in user.args[:3])
        or (calls(user, "contiguous") and _is_added(user))
        for user in node.users
    )


def _is_dense(given: Tensor, expanded: tuple[int, ...]) -> bool:
    """Whether it has the strides of a contiguous tensor, but for dimensions that are expanded."""
    step: Any = 1
    for dim in reversed(range(given.dim())):
        if dim not in expanded and str(given.shape[dim]) != "1":
            if str(given.stride(dim)) != str(step):
                return False
            step = step * given.shape[dim]
    return True


def _repeats(node: Node) -> Iterator[Node]:
    """What repeats heads of keys and values for one call of attention alone."""
    call = attention_arguments(node)
    for repeated, narrow in zip((call.key, call.value), unrepeated_pair(call)):
        while repeated is not narrow and len(repeated.users) == 1:
            yield repeated
            repeated = repeated.args[0]
