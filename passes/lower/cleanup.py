"""Removes what lowering left dead (gradients nobody asked for) and makes sure that no op is left over."""

from torch.fx import Graph

from tunecompile.errors import LeftoverOp
from tunecompile.op import OPS
from tunecompile.pipeline import Context, Pass


def run(graph: Graph, context: Context) -> None:
    graph.eliminate_dead_code()
    left = sorted({OPS[node.target].name for node in graph.nodes if node.target in OPS and not OPS[node.target].opaque})
    if left:
        raise LeftoverOp(ops=", ".join(left))


PASS = Pass("cleanup", "lower", run, requires=frozenset({"choose_provider"}))
