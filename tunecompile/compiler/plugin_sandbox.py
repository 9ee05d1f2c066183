"""A sandbox for passes of other packages: one that raises, or leaves an invalid graph, costs only itself.

The pass works on the graph itself, since torch and other passes hold its nodes: a copy that is swapped in would change
all of them after every success. Where the pass fails, the graph is rebuilt from a backup.
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
from tunecompile.notes import Note, note

log = logging.getLogger("tunecompile")


@dataclass(eq=False)
class Package:
    """An installed package that brings passes, and which of its passes are switched off for one model."""

    label: str  #: name and version
    digest: str  #: of its source
    failed: dict[str, str] = field(default_factory=dict)  #: pass -> why it is switched off

    @property
    def key(self) -> str:
        """The package and its source, part of the cache keys of compiled code."""
        return f"{self.label} {self.digest}"

    def switch_off(self, name: str, why: str) -> None:
        """Switch a pass off for this model, with a warning."""
        self.failed[name] = why
        log.warning("tunecompile: %s", self.describe_failure(name))

    def describe_failure(self, name: str) -> Note:
        """Why a pass is switched off, for the report."""
        return note("pass-switched-off", name, self.failed[name], package=self.label)


class InvalidGraph(Exception):
    """A pass left a graph that cannot be compiled; the message says why."""


def guarded(package: Package, name: str, run: Callable[[], Any], graph: Graph, key: str) -> bool:
    """Run a pass of a package. If it fails, it is switched off, and the graph is as it was.

    Args:
        package: of the pass.
        name: of the pass.
        run: the pass, which changes the graph in place.
        graph: the graph.
        key: of fake values in nodes' metadata: "example_value" before autograd, "val" after it.

    Returns:
        Whether the pass succeeded.
    """
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
    """A copy of a graph as it is now, to check and undo what a pass does to it."""

    def __init__(self, graph: Graph):
        self.graph, self.nodes = graph, set(graph.nodes)
        self.interface = {key: _interface(graph, key) for key in ("example_value", "val")}
        self.names = [node.name for node in graph.nodes]
        self.copy = Graph()
        _copy_nodes(graph, self.copy)

    def compare(self, key: str) -> None:
        """Check that the graph still takes and returns the same, and that its new nodes have fake values.

        Args:
            key: of fake values in nodes' metadata.

        Raises:
            InvalidGraph: one of these does not hold.
            RuntimeError: the graph does not pass fx's own lint.
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
        """Rebuild the graph as it was, of new nodes with the old names."""
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
    """Append copies of all nodes to another graph."""
    copies: dict[Node, Node] = {}
    for node in source.nodes:
        copies[node] = target.node_copy(node, copies.__getitem__)


def _interface(graph: Graph, key: str) -> tuple[list[str], list[str]]:
    """Inputs and outputs as text, one entry each."""
    inputs = [f"{node.target}, {_kind(node, key)}" for node in graph.find_nodes(op="placeholder")]
    return inputs, [
        _kind(leaf, key) for output in graph.find_nodes(op="output") for leaf in pytree.tree_leaves(output.args)
    ]


def _kind(leaf: Any, key: str) -> str:
    """Dtype, shape and device of a tensor as text; before autograd, also whether it requires a gradient."""
    value = leaf.meta.get(key) if isinstance(leaf, Node) else leaf
    if not isinstance(value, torch.Tensor):
        return str(value)
    gradient = ", with a gradient" if key == "example_value" and value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}{gradient}"
