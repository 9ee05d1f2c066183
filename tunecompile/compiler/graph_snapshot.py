"""Small copies of graphs for `explain`: names, shapes and lines of the model, without tensors, weights or symbols.

Of each compiled graph one is kept from before recognition and one from after it: some ten kilobytes, made in a few
milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch.inductor import replacing
from tunecompile.ir.canonicalize import name_of, value
from tunecompile.ir.op import NAMESPACE
from tunecompile.ir.rewrite import user_line

log = logging.getLogger("tunecompile")
SHORT = {
    "scaled_dot_product_attention": "attention",
    "getitem": "slice",
    "autograd_function_apply": "autograd function",
}


@dataclass(frozen=True)
class Box:
    """One operation, an input that is not a weight, or the result."""

    name: str  #: of its node
    label: str  #: the operation, in a word or two
    kind: str  #: "input", "result", "op" (of this package) or "call"
    shape: str  #: of its first tensor: "2×16×64", symbols by their names
    dtype: str
    inputs: tuple[str, ...]  #: names of the boxes it reads
    weights: tuple[str, ...]  #: of the layer, by the layer's own names, with shapes
    module: str  #: the layer's submodule that computes it
    line: str  #: place in the user's code: "modeling_mine.py:64"
    code: str  #: the source line there
    gives: tuple[str, ...] = ()  #: nodes of the graph before recognition whose place it took
    missed: str = ""  #: why it was not rewritten, if a family matches such operations


@dataclass(frozen=True)
class GraphSnapshot:
    """The boxes of a graph, in the order in which they run."""

    boxes: tuple[Box, ...]

    @property
    def calls(self) -> int:
        """How many operations there are."""
        return sum(box.kind in ("op", "call") for box in self.boxes)

    @property
    def outline(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """A value that is equal for two graphs that differ only in shapes."""
        return tuple((box.name, box.label, box.inputs) for box in self.boxes)


def snapshot(graph: Graph, given: dict[str, set[str]] | None = None) -> GraphSnapshot | None:
    """Copy a graph.

    Args:
        graph: not changed.
        given: for each new node the nodes whose place it took (`replacements`).

    Returns:
        The copy; None if the graph cannot be read, which costs its rows in `explain` and not the training.
    """
    try:
        return GraphSnapshot(tuple(_boxes(graph, given or {})))
    except Exception:
        log.debug("a graph could not be read", exc_info=True)
        return None


@contextlib.contextmanager
def replacements(gm: GraphModule) -> Iterator[dict[str, set[str]]]:
    """Yields for each new node the earlier nodes whose place it took, filled while passes run."""
    took: dict[str, set[str]] = defaultdict(set)

    def record(old: Node, new: str, user: Node) -> None:
        took[new] |= took.get(old.name) or {old.name}

    with replacing(gm, record):
        yield took


def _boxes(graph: Graph, given: dict[str, set[str]]) -> Iterator[Box]:
    drawn: dict[Node, str] = {}  # node -> the box that shows it; members of a tuple share the box of their call
    made: dict[str, Box] = {}
    for node in graph.nodes:
        whole = node.args[0] if node.target is getitem else None
        if isinstance(whole, Node) and whole in drawn and not isinstance(value(whole), torch.Tensor):
            drawn[node] = drawn[whole]
            box = made[drawn[whole]]
            made[box.name] = replace(
                box,
                gives=(*box.gives, *sorted(given.get(node.name, ()))),
                missed=box.missed or node.meta.get("missed", ""),
            )
        elif (kind := _kind(node, drawn)) is not None:
            drawn[node] = node.name
            made[node.name] = _box(
                node,
                kind,
                tuple(dict.fromkeys(drawn[n] for n in node.all_input_nodes if n in drawn)),
                tuple(sorted(given.get(node.name, ()))),
            )
    yield from made.values()


def _kind(node: Node, drawn: dict[Node, str]) -> str | None:
    """A node's kind of box; None for nodes that are not shown: weights, sizes, switches of modes."""
    if node.op == "output":
        return "result"
    tensor = _first(value(node))
    if node.op == "placeholder":
        return "input" if tensor is not None and not _is_weight(node) else None
    if (
        not node.op.startswith("call")
        or (tensor is None and not any(n in drawn for n in node.all_input_nodes))
        or isinstance(value(node), (int, torch.SymInt))
    ):
        return None
    return "op" if getattr(node.target, "namespace", "") == NAMESPACE else "call"


def _box(node: Node, kind: str, inputs: tuple[str, ...], gives: tuple[str, ...]) -> Box:
    line, code = user_line(node)
    weights = tuple(
        f"{_plain(str(n.target))} {_shape(_first(value(n)))}".strip() for n in node.all_input_nodes if _is_weight(n)
    )
    if kind == "result":
        label = "result"
    elif kind == "input":
        label = _plain(str(node.target))
    else:
        label = name_of(node.target).removeprefix(f"{NAMESPACE}.")
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    module = str(modules[-1][0]).partition("]")[2].strip(".") if modules else ""
    tensor = _first(value(node.all_input_nodes[0] if kind == "result" and node.all_input_nodes else node))
    return Box(
        node.name,
        SHORT.get(label, label),
        kind,
        _shape(tensor),
        "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
        inputs,
        weights,
        module,
        line,
        code,
        gives,
        node.meta.get("missed", ""),
    )


def _is_weight(node: Node) -> bool:
    """Whether this is a weight of the layer.

    Dynamo traces `_region(layer, *args, **kwargs)`, and functions of modules after a graph break.
    """
    return node.op == "placeholder" and (
        str(node.target).startswith("L_layer_") or isinstance(value(node), torch.nn.Parameter)
    )


def _plain(target: str) -> str:
    """The model's name of an input, from Dynamo's: self_attn.q_proj.weight."""
    name = re.sub(r"^L_(layer_|kwargs_|self_)?", "", target).strip("_")
    return re.sub(
        r"(^|_)(modules|parameters|buffers)_", lambda found: found[1] and ".", re.sub(r"^args_(\d+)", r"input \1", name)
    )


def _first(value: Any) -> torch.Tensor | None:
    return next((leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)), None)


def _shape(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else "×".join(map(str, tensor.shape)) or "1"
