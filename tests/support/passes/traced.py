"""Functions as graphs of the recognize stage, without Dynamo: what a pass makes of one costs milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, map_arg, symbolic_trace

from tests.support.passes.run import assert_same, count, recognize, results
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import canonicalize


class _Recording(Interpreter):
    """Notes each node's value, as Dynamo does."""

    def run_node(self, n: Node):
        n.meta["example_value"] = made = super().run_node(n)
        return made


def traced(fn: Callable, *args: torch.Tensor) -> GraphModule:
    """A function's graph with fake values, in canonical spellings."""
    gm = symbolic_trace(fn)
    mode = FakeTensorMode()
    with mode:
        _Recording(gm).run(*(mode.from_tensor(each) for each in args))
    _fold(gm.graph)
    canonicalize(gm)
    return gm


def _fold(graph: Graph) -> None:
    """Put constants in the place of dtypes and sizes, which Dynamo reads while it traces."""
    constants = (torch.dtype, torch.device, torch.Size, int, float)
    known = {node: made for node in graph.nodes if isinstance(made := node.meta["example_value"], constants)}
    for node in graph.nodes:
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda each: known.get(each, each))
    for node in reversed(known):
        graph.erase_node(node)


def recognized(
    fn: Callable, *args: torch.Tensor, passes: Sequence[Pass], expect: dict | None = None, tol=1e-5, tidy=False
):
    """(The graph after passes, the context); its results and gradients are the function's. `expect`: ops in it.
    `tidy`: nothing is left over of what they replaced."""
    gm, context = traced(fn, *args), Context("test")
    recognize(passes, gm, context, tidy)
    gm.recompile()
    ours, theirs = results(gm, args), results(fn, args)
    assert_same(ours[0] + ours[1], theirs[0] + theirs[1], tol)
    assert expect is None or dict(count(gm.graph)) == expect, (dict(count(gm.graph)), context.tallies)
    return gm.graph, context
