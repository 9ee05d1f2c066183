"""Passes of other packages run under guard: one that raises, or leaves a graph that is not valid, costs itself and nothing else.

The pass works on the graph itself, whose nodes stay those that others know. Where it fails, the graph is made anew from a snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from tunecompile.errors import summary

log = logging.getLogger("tunecompile")


@dataclass(eq=False)
class Package:
    """An installed package that brings passes, and which of them are switched off, for the model they were put together for."""

    label: str  #: name and version
    digest: str  #: of its source
    failed: dict[str, str] = field(default_factory=dict)  #: pass -> why it is switched off

    @property
    def key(self) -> str:
        """Code that was compiled with other source never stands in for this."""
        return f"{self.label} {self.digest}"

    def switch_off(self, name: str, why: str) -> None:
        self.failed[name] = why
        log.warning("tunecompile: %s", self.said(name))

    def said(self, name: str) -> str:
        return f"{name} of {self.label} is switched off for this model: {self.failed[name]}"


class InvalidGraph(Exception):
    """What a pass left cannot be compiled; the message says why."""


def guarded(package: Package, name: str, run: Callable[[], Any], graph: Graph, key: str) -> bool:
    """Whether a pass of the package succeeded; if not, it is switched off, and the graph is as it was. key: of fake values among metadata."""
    snapshot = GraphBackup(graph)
    try:
        run()
        snapshot.compare(key)
    except Exception as error:
        package.switch_off(name, summary(error))
        snapshot.restore()
        return False
    return True


class GraphBackup:
    """A graph as it is now."""

    def __init__(self, graph: Graph):
        self.graph, self.nodes, self.interface = (
            graph,
            set(graph.nodes),
            {key: _interface(graph, key) for key in ("example_value", "val")},
        )
        self.names = [node.name for node in graph.nodes]
        self.copy = Graph()
        _copy_nodes(graph, self.copy)

    def compare(self, key: str) -> None:
        """Whether the graph is still one that takes and returns the same, and whose new values are known.

        Raises:
            InvalidGraph: it is not.
        """
        self.graph.lint()
        for what, before, now in zip(("inputs", "outputs"), self.interface[key], _interface(self.graph, key)):
            if len(before) != len(now):
                raise InvalidGraph(f"the graph has {len(now)} {what} instead of {len(before)}")
            for i, (old, new) in enumerate(zip(before, now)):
                if old != new:
                    raise InvalidGraph(f"{what.removesuffix('s')} {i} of the graph is {new} instead of {old}")
        for node in self.graph.nodes:
            if node not in self.nodes and node.op != "output" and node.users and key not in node.meta:
                raise InvalidGraph(f"the new node {node.name} has no fake value: meta[{key!r}] is missing")

    def restore(self) -> None:
        """The graph as it was, of new nodes by the old names."""
        graph = self.graph
        for node in list(graph.nodes):
            node.args, node.kwargs = (), {}
        for node in list(graph.nodes):
            graph.erase_node(node)
        graph.inserting_after()  # at the end, wherever the pass inserted last
        _copy_nodes(self.copy, graph)
        for node, name in zip(graph.nodes, self.names):
            node.name = name


def _copy_nodes(source: Graph, target: Graph) -> None:
    copies: dict[Node, Node] = {}
    for node in source.nodes:
        copies[node] = target.node_copy(node, copies.__getitem__)


def _interface(graph: Graph, key: str) -> tuple[list[str], list[str]]:
    """Inputs and outputs in words."""
    inputs = [f"{node.target}, {_kind(node, key)}" for node in graph.find_nodes(op="placeholder")]
    return inputs, [
        _kind(leaf, key) for output in graph.find_nodes(op="output") for leaf in pytree.tree_leaves(output.args)
    ]


def _kind(leaf: Any, key: str) -> str:
    """Dtype, shape and device of a tensor, symbols by their expressions; before autograd, also whether it has a gradient."""
    value = leaf.meta.get(key) if isinstance(leaf, Node) else leaf
    if not isinstance(value, torch.Tensor):
        return str(value)
    gradient = ", with a gradient" if key == "example_value" and value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}{gradient}"
