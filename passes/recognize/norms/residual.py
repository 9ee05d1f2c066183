"""A residual sum in front of a norm: which sums may become one op with it, and the pass that looks for them."""

import torch
from torch.fx import Graph

from tunecompile.compiler.pass_manager import Context, MatchCount, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.match import Match
from tunecompile.ir.nodes import is_mutation
from tunecompile.ir.op import Op
from tunecompile.ir.rewrite import Rewrite, apply

__all__ = ["alike", "in_one_dtype", "joined"]


def alike(match: Match) -> str | None:
    """Why x and residual of a match cannot be the summands of one op, or None."""
    x, residual = value(match.bound["x"]), value(match.bound["residual"])
    if not isinstance(x, torch.Tensor) or not isinstance(residual, torch.Tensor):
        return "a summand is a constant"
    if any(is_mutation(user) for user in match.outputs[1].users):  # the op saves the sum for its backward
        return "the sum is changed in place afterwards"
    if not x.is_floating_point() or not residual.is_floating_point():
        return "a summand is not of a floating dtype"
    return None if tuple(residual.shape) == tuple(x.shape) else "the summands differ in shape"


def in_one_dtype(x: torch.fx.Proxy, residual: torch.fx.Proxy) -> list[torch.fx.Proxy]:
    """Return the summands in the dtype of their sum: under autocast a projection adds bf16 to a residual in fp32."""
    given = [dtype_of(side.node) for side in (x, residual)]
    wide = torch.promote_types(*given)
    return [side if dtype == wide else side.to(wide) for side, dtype in zip((x, residual), given)]


def joined(norm: Op, rewrite: Rewrite) -> Pass:
    """The pass of a rewrite, whose pattern gives a norm of a sum, and the sum."""

    def run(graph: Graph, context: Context) -> None:
        total = rewrite.pattern.outputs[1].target
        sums = [n for n in graph.nodes if n.target is norm.overload and n.args[0].target is total]
        places, refused = apply(rewrite, graph)
        context.tallies.append(MatchCount(rewrite.name, len(sums), len(places), refused, places))

    return Pass(rewrite.name, "recognize", run, requires=frozenset({norm.name}))
