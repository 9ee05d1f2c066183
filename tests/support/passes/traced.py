"""Functions as graphs of the recognize stage, without Dynamo: what a pass makes of one costs milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule

from tests.support.passes.captured import captured
from tests.support.passes.run import assert_same, count, recognize, results
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import canonicalize


def traced(fn: Callable, *args: torch.Tensor) -> GraphModule:
    """A function's graph with fake values, in canonical spellings."""
    gm = captured(fn, args)
    canonicalize(gm)
    return gm


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
