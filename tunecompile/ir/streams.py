"""Layers that return several streams as slices of one tensor return them contiguous, as they were given them.

The next layer of the kind is then called as the first one was, and has no graph of its own. The parts are written in
place of the whole, by the same kernel."""

import operator

import torch
from torch.fx import Graph, Node

from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import node_arg
from tunecompile.ir.rewrite import annotate

_FRESH = (operator.add, torch.cat, "clip")  #: what computes a tensor with memory of its own, behind a residual


def _slice_of(item: object) -> Node | None:
    """What a result is a slice of; None for all others."""
    if not isinstance(item, Node) or item.target is not operator.getitem or (whole := node_arg(item, 0)) is None:
        return None
    found = value(item)
    return whole if isinstance(found, torch.Tensor) and found.dim() > 2 and whole.target in _FRESH else None


def return_contiguous(graph: Graph) -> None:
    """Have a layer return streams in memory of their own that are slices of one tensor.

    Args:
        graph: of the recognize stage, changed in place.
    """
    (output,) = graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else ()
    wholes = [_slice_of(item) for item in results]
    for part in {item for item, whole in zip(results, wholes) if whole is not None and wholes.count(whole) > 1}:
        with graph.inserting_before(output):
            # (a slice of one row is contiguous, with a stride of the whole: guards would tell)
            alone = graph.call_method("clone", (part,), {"memory_format": torch.contiguous_format})
        annotate(alone, part)
        output.replace_input_with(part, alone)
