"""Subgraph matching: commutative operands, captured scalars, optional casts, no outside user of an inner value."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx import Graph, Node

from tunecompile.ir.canonicalize import canonicalize_graph, value
from tunecompile.ir.nodes import is_barrier

__all__ = ["Match", "Matcher", "Miss", "Pattern", "cast"]

COMMUTATIVE = {operator.add, operator.mul}


def cast(x):
    """Mark an optional cast in a pattern.

    Args:
        x: a value of the pattern.

    Returns:
        A value that matches x, and x cast to any dtype.
    """
    return x.tracer.create_proxy("call_function", cast, (x,), {})


@dataclass(frozen=True)
class Pattern:
    """A traced pattern function."""

    graph: Graph  #: canonical, without fake values
    parameters: tuple[str, ...]  #: names that a match binds, to tensors, scalars, dtypes or None
    outputs: tuple[Node, ...]  #: the values that the function returns

    @staticmethod
    def trace(fn: Callable) -> Pattern:
        """Make a pattern of a function.

        Args:
            fn: is traced with `torch.fx`. Its parameters stay symbolic, so a slice bound or an epsilon is captured like
                any other argument.
        """
        graph = _Tracer().trace(fn)
        canonicalize_graph(graph)
        parameters = tuple(node.target for node in graph.nodes if node.op == "placeholder")
        (output,) = (node for node in graph.nodes if node.op == "output")
        returned = output.args[0]
        return Pattern(graph, parameters, tuple(returned) if isinstance(returned, (tuple, list)) else (returned,))

    @property
    def anchor(self) -> tuple[str, Any]:
        """The (op, target) of the pattern's first output; a match is looked for at each node that calls it."""
        return self.outputs[0].op, self.outputs[0].target

    def calls(self, node: Node) -> list[Node]:
        """Return the pattern's nodes with the same op and target as `node`, a node of a graph."""
        return [inner for inner in self.graph.nodes if (inner.op, inner.target) == (node.op, node.target)]


class _Tracer(fx.Tracer):
    """Traces no module's inside."""

    def is_leaf_module(self, module, name):
        return True


@dataclass(frozen=True)
class Match:
    """Where a pattern was found."""

    pattern: Pattern  #: the pattern that was found
    bound: dict[str, Any]  #: parameters to nodes or constants
    nodes: dict[Node, Node]  #: the pattern's nodes to the graph's

    @property
    def outputs(self) -> tuple[Node, ...]:
        """The graph's nodes that correspond to the pattern's outputs."""
        return tuple(self.nodes[node] for node in self.pattern.outputs)

    def node(self, name: str) -> Node:
        """Return the graph's node for the pattern's node `name`, as torch.fx named it ("rsqrt", "linear_1", ...)."""
        return next(found for node, found in self.nodes.items() if node.name == name)


@dataclass(frozen=True)
class Miss:
    """Where an attempt to match a pattern failed."""

    bound: dict[Node, Any]  #: the pattern's nodes to the graph's, as far as they had been matched
    expected: Any  #: the pattern's next item: a node or a constant
    found: Any  #: the graph's item in its place

    @property
    def share(self) -> float:
        """How much of the pattern was matched: of its operations, those found at an operation of their own.

        A count would always favour the wide patterns, of which a part is found nearly everywhere. Where one value of
        the pattern was found at two of the graph, either is a wrong reading, so that their readers do not count.
        """
        doubted = self.expected.users if isinstance(self.expected, Node) and self.expected in self.bound else ()
        inner = [node for node in self.bound if _computes(node)]
        found = {self.bound[node] for node in inner if node not in doubted}
        return len(found) / sum(_computes(node) for node in inner[0].graph.nodes) if inner else 0.0

    @property
    def is_news(self) -> bool:
        """Whether the value found is not yet bound in the pattern. (After a vain exchange of operands it often is.)"""
        return isinstance(self.found, Node) and not any(self.found is other for other in self.bound.values())


def _computes(node: Node) -> bool:
    """Whether a node of a pattern is an operation that every match has."""
    return node.op.startswith("call") and node.target is not cast


class Matcher:
    """Matches patterns against one canonical graph. Make a new matcher after the graph changed."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.by_target: dict[tuple[str, Any], list[Node]] = {}
        self.epoch: dict[Node, int] = {}
        barriers = 0
        for node in graph.nodes:
            barriers += is_barrier(node)
            self.epoch[node] = barriers
            self.by_target.setdefault((node.op, node.target), []).append(node)

    def anchors(self, pattern: Pattern) -> list[Node]:
        """Return the nodes that may be the first output of `pattern`."""
        return list(self.by_target.get(pattern.anchor, ()))

    def find(self, pattern: Pattern) -> Iterator[Match]:
        """Yield one match of `pattern` for each anchor that has one."""
        for anchor in self.anchors(pattern):
            yield from itertools.islice(self.at(pattern, anchor), 1)

    def at(self, pattern: Pattern, anchor: Node) -> Iterator[Match]:
        """Yield every match without a `flaw` whose first output is `anchor`; operands may be exchanged."""
        return (match for match in _whole(pattern, _unify(pattern.outputs[0], anchor, {})) if self.flaw(match) is None)

    def around(self, pattern: Pattern, node: Node, missed: list[Miss]) -> Iterator[Match]:
        """Yield every match that contains `node`, with or without a `flaw`.

        Args:
            pattern: to match.
            node: of the graph. Where the pattern has no such operation, matching begins at the node's users.
            missed: failed attempts are appended to it.
        """
        starts = [(inner, node) for inner in pattern.calls(node)] or [
            (inner, user) for user in node.users for inner in pattern.calls(user)
        ]
        for inner, found in starts:
            for env in _unify(inner, found, {}, missed):
                yield from _whole(pattern, _climb(pattern, inner, found, env, missed))

    def flaw(self, match: Match) -> tuple[str, Node] | None:
        """Return why `match` must not be rewritten, and the node at fault; None where it may be.

        Faults are a barrier between the first and the last node of the match, and an outside user of an inner value.
        """
        inside, outputs = set(match.nodes.values()), set(match.outputs)
        epochs = {self.epoch[node] for node in inside}
        if len(epochs) > 1:
            return "comes in between", next(node for node, epoch in self.epoch.items() if epoch > min(epochs))
        elsewhere = (user for node in inside - outputs for user in node.users if user not in inside)
        return next((("uses an inner value too", user) for user in elsewhere), None)


def _whole(pattern: Pattern, readings: Iterator[dict[Node, Any]]) -> Iterator[Match]:
    """The readings that bind every parameter and output, as matches."""
    for env in readings:
        bound = {str(node.target): env[node] for node in env if node.op == "placeholder"}
        nodes = {node: found for node, found in env.items() if node.op != "placeholder"}
        if set(pattern.parameters) == set(bound) and all(out in nodes for out in pattern.outputs):
            yield Match(pattern, bound, nodes)


def _climb(
    pattern: Pattern, node: Node, found: Node, env: dict[Node, Any], missed: list[Miss]
) -> Iterator[dict[Node, Any]]:
    """All ways to match the rest of the pattern, from user to user, once `node` and its inputs are bound."""
    if node is pattern.outputs[0]:
        yield env
        return
    for reader in node.users:
        if reader.target is cast:  # it may be absent
            yield from _climb(pattern, reader, found, env, missed)
        for user in found.users if reader.op != "output" else ():
            for bound in _unify(reader, user, env, None if reader.target is cast else missed):
                yield from _climb(pattern, reader, user, bound, missed)


def _unify(
    pattern: Any, found: Any, env: dict[Node, Any], missed: list[Miss] | None = None
) -> Iterator[dict[Node, Any]]:
    """All ways to match `found` with `pattern`, given the bindings `env`; failed attempts are appended to `missed`."""
    if isinstance(pattern, Node):
        yield from _unify_node(pattern, found, env, missed)
    elif isinstance(pattern, (tuple, list)) and isinstance(found, (tuple, list)) and len(found) == len(pattern):
        yield from _unify_all(list(zip(pattern, found)), env, missed)
    elif isinstance(pattern, slice) and isinstance(found, slice):
        yield from _unify_all(
            [(pattern.start, found.start), (pattern.stop, found.stop), (pattern.step, found.step)], env, missed
        )
    elif not isinstance(pattern, (tuple, list, slice)) and _equal(pattern, found):
        yield env
    elif missed is not None:
        missed.append(Miss(env, pattern, found))


def _unify_node(
    pattern: Node, found: Any, env: dict[Node, Any], missed: list[Miss] | None
) -> Iterator[dict[Node, Any]]:
    if pattern in env and _same(env[pattern], found):
        yield env
    elif pattern in env or not _fits(pattern, found):
        if missed is not None:
            missed.append(Miss(env, pattern, found))
    elif pattern.op == "placeholder":
        yield {**env, pattern: found}
    elif pattern.target is cast:
        inner = pattern.args[0]
        if isinstance(found, Node) and found.op == "call_method" and found.target == "to" and len(found.args) == 2:
            yield from _unify(inner, found.args[0], {**env, pattern: found}, missed)
        yield from _unify(inner, found, env, missed)
    else:
        env = {**env, pattern: found}
        keywords = [(pattern.kwargs[k], found.kwargs[k]) for k in pattern.kwargs]
        yield from _unify_all([*zip(pattern.args, found.args), *keywords], env, missed)
        if pattern.target in COMMUTATIVE:
            yield from _unify_all(list(zip(pattern.args, reversed(found.args))), env, missed)


def _unify_all(
    pairs: list[tuple[Any, Any]], env: dict[Node, Any], missed: list[Miss] | None
) -> Iterator[dict[Node, Any]]:
    if not pairs:
        yield env
        return
    (pattern, found), *rest = pairs
    for bound in _unify(pattern, found, env, missed):
        yield from _unify_all(rest, bound, missed)


def _fits(pattern: Node, found: Any) -> bool:
    """Whether the operation itself matches: a parameter matches one value of any kind, a call one of the same form."""
    if pattern.op == "placeholder":
        return not _are_tensors(found)
    if pattern.target is cast:
        return True
    return (
        isinstance(found, Node)
        and (found.op, found.target) == (pattern.op, pattern.target)
        and len(found.args) == len(pattern.args)
        and set(found.kwargs) == set(pattern.kwargs)
    )


def _are_tensors(found: Any) -> bool:
    """Whether it is the result of an operation that returns several: no op takes such an input. (An item of it would
    match a slice of a tensor, since both are `getitem`.)
    """
    several = value(found) if isinstance(found, Node) else None
    return isinstance(several, (tuple, list)) and any(isinstance(each, Tensor) for each in several)


def _equal(pattern: Any, found: Any) -> bool:
    """Whether a constant equals the pattern's."""
    if isinstance(found, Node):
        return False
    numbers = isinstance(pattern, (int, float)) and isinstance(found, (int, float)) and not isinstance(found, bool)
    return (numbers or type(pattern) is type(found)) and pattern == found


def _same(left: Any, right: Any) -> bool:
    return (
        left is right
        if isinstance(left, Node) or isinstance(right, Node)
        else type(left) is type(right) and left == right
    )
