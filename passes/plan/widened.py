"""What an op widens by itself is read as it was before autocast widened it: half of the bytes, and templates take it.

A GPU's norm gives fp32 under autocast, the product behind it reads bf16, and its gradient is cast back to fp32.
"""

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import OPS
from tunecompile.ir.views import cast_of

__all__ = ["PASS"]


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes):
        op = OPS.get(node.target) if node.op == "call_function" else None
        for name in op.widens if op is not None else ():
            place = op.parameters.index(name)
            cast = node.args[place]
            source, dtype = cast_of(cast)
            if isinstance(source, Node) and dtype is not None and _is_exact(source.meta["val"].dtype, dtype):
                node.update_arg(place, source)
                if not cast.users:
                    graph.erase_node(cast)


def _is_exact(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a wide dtype holds all numbers of a narrow one."""
    return narrow.is_floating_point and torch.promote_types(narrow, wide) == wide


PASS = Pass("widened", "plan", run)
