"""A residual add followed by a norm becomes one op: each input is read once, and one pass adds both gradients."""

import torch

from tunecompile.compiler.pass_manager import Context, MatchCount, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.match import Match
from tunecompile.ir.nodes import is_mutation
from tunecompile.ir.rewrite import apply, rewrite
from tunecompile.ops import add_rms_norm, rms_norm

__all__ = ["PASS", "alike", "in_one_dtype"]


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


def _build(x, residual, weight, eps, offset, round_first):
    made = add_rms_norm(*in_one_dtype(x, residual), weight, eps, offset, round_first)
    return made[0], made[1]


@rewrite("add_rms_norm", to=_build, where=alike)
def residual_norm(x, residual, weight, eps, offset, round_first):
    total = x + residual
    return rms_norm(total, weight, eps, offset, round_first), total


def run(graph, context: Context) -> None:
    anchors = [
        n
        for n in graph.nodes
        if n.target is rms_norm.overload and n.args[0].target is residual_norm.pattern.outputs[1].target
    ]
    places, refused = apply(residual_norm, graph)
    context.tallies.append(MatchCount("add_rms_norm", len(anchors), len(places), refused, places))


PASS = Pass("add_rms_norm", "recognize", run, requires=frozenset({"rms_norm"}), provides=frozenset({"add_rms_norm"}))
