"""Find a small graph inside a large one: commutative operands, captured scalars, optional casts, no foreign user of an inner value."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any, Callable, Iterator

from torch import fx
from torch.fx import Graph, Node

from tunecompile.canonical import canonicalize_graph, is_barrier

COMMUTATIVE = {operator.add, operator.mul}


def cast(x):
    """In a pattern: x, or x cast to any dtype."""
    return x.tracer.create_proxy("call_function", cast, (x,), {})


@dataclass(frozen=True)
class Pattern:
    """A traced pattern function. Parameters are what it binds: tensors, scalars, dtypes or None alike."""

    graph: Graph
    parameters: tuple[str, ...]
    outputs: tuple[Node, ...]

    @staticmethod
    def trace(fn: Callable) -> "Pattern":
        """Trace with `torch.fx`: parameters stay symbolic, so a slice bound or an epsilon is a capture like any other."""
        graph = _Tracer().trace(fn)
        canonicalize_graph(graph)
        parameters = tuple(node.target for node in graph.nodes if node.op == "placeholder")
        (output,) = (node for node in graph.nodes if node.op == "output")
        returned = output.args[0]
        return Pattern(graph, parameters, tuple(returned) if isinstance(returned, (tuple, list)) else (returned,))

    @property
    def anchor(self) -> tuple[str, Any]:
        return self.outputs[0].op, self.outputs[0].target


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module, name):
        return True


@dataclass(frozen=True)
class Match:
    """Where a pattern was found. `bound` maps parameters to nodes or constants, `nodes` the pattern's nodes to the graph's."""

    pattern: Pattern
    bound: dict[str, Any]
    nodes: dict[Node, Node]

    @property
    def outputs(self) -> tuple[Node, ...]:
        return tuple(self.nodes[node] for node in self.pattern.outputs)

    def node(self, name: str) -> Node:
        """The graph's node for a pattern node, by the name torch.fx gave it ("rsqrt", "linear_1", ...)."""
        return next(found for node, found in self.nodes.items() if node.name == name)


class Matcher:
    """Matches patterns against one graph. Make a new one after the graph changed."""

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
        """The nodes that may be the pattern's first output."""
        return list(self.by_target.get(pattern.anchor, ()))

    def find(self, pattern: Pattern) -> Iterator[Match]:
        """One match at each anchor that has any."""
        for anchor in self.anchors(pattern):
            yield from itertools.islice(self.at(pattern, anchor), 1)

    def at(self, pattern: Pattern, anchor: Node) -> Iterator[Match]:
        """All ways to read the pattern there (operands may be exchanged)."""
        return (match for match in self._readings(pattern, anchor) if self._closed(match))

    def _readings(self, pattern: Pattern, anchor: Node) -> Iterator[Match]:
        for env in _unify(pattern.outputs[0], anchor, {}):
            bound = {node.target: env[node] for node in env if node.op == "placeholder"}
            nodes = {node: found for node, found in env.items() if node.op != "placeholder"}
            if set(pattern.parameters) == set(bound) and all(out in nodes for out in pattern.outputs):
                yield Match(pattern, bound, nodes)

    def _closed(self, match: Match) -> bool:
        """No inner value is used outside, and no barrier lies between the first and the last node."""
        inside, outputs = set(match.nodes.values()), set(match.outputs)
        if len({self.epoch[node] for node in inside}) > 1:
            return False
        return all(user in inside for node in inside - outputs for user in node.users)


def _unify(pattern: Any, found: Any, env: dict[Node, Any]) -> Iterator[dict[Node, Any]]:
    """All ways to read `found` as `pattern`, given what is bound already."""
    if isinstance(pattern, Node):
        yield from _unify_node(pattern, found, env)
    elif isinstance(pattern, (tuple, list)):
        if isinstance(found, (tuple, list)) and len(found) == len(pattern):
            yield from _unify_all(list(zip(pattern, found)), env)
    elif isinstance(pattern, slice):
        if isinstance(found, slice):
            yield from _unify_all([(pattern.start, found.start), (pattern.stop, found.stop), (pattern.step, found.step)], env)
    elif not isinstance(found, Node) and type(pattern) is type(found) and pattern == found:
        yield env
    elif isinstance(pattern, (int, float)) and isinstance(found, (int, float)) and not isinstance(found, bool) and pattern == found:
        yield env


def _unify_node(pattern: Node, found: Any, env: dict[Node, Any]) -> Iterator[dict[Node, Any]]:
    if pattern in env:
        if _same(env[pattern], found):
            yield env
    elif pattern.op == "placeholder":
        yield {**env, pattern: found}
    elif pattern.target is cast:
        inner = pattern.args[0]
        if isinstance(found, Node) and found.op == "call_method" and found.target == "to" and len(found.args) == 2:
            yield from _unify(inner, found.args[0], {**env, pattern: found})
        yield from _unify(inner, found, env)
    elif isinstance(found, Node) and (found.op, found.target) == (pattern.op, pattern.target):
        if len(found.args) != len(pattern.args) or set(found.kwargs) != set(pattern.kwargs):
            return
        env = {**env, pattern: found}
        keywords = [(pattern.kwargs[k], found.kwargs[k]) for k in pattern.kwargs]
        yield from _unify_all([*zip(pattern.args, found.args), *keywords], env)
        if pattern.target in COMMUTATIVE:
            yield from _unify_all(list(zip(pattern.args, reversed(found.args))), env)


def _unify_all(pairs: list[tuple[Any, Any]], env: dict[Node, Any]) -> Iterator[dict[Node, Any]]:
    if not pairs:
        yield env
        return
    (pattern, found), *rest = pairs
    for bound in _unify(pattern, found, env):
        yield from _unify_all(rest, bound)


def _same(left: Any, right: Any) -> bool:
    return left is right if isinstance(left, Node) or isinstance(right, Node) else type(left) is type(right) and left == right
