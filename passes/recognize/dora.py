"""The norms of adapted weights, as PEFT writes them for DoRA.

PEFT multiplies both matrices of the adapter by an identity of K x K, which is as large as the weight or larger.
"""

import torch

from tunecompile._torch.modules import linear
from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.match import Match, cast
from tunecompile.ir.rewrite import rewrite
from tunecompile.ops import adapted_norm

__all__ = ["PASS"]


def _whole(match: Match) -> str | None:
    bound = match.bound
    weight, a, b = value(bound["weight"]), value(bound["a"]), value(bound["b"])
    if not isinstance(bound["scale"], (int, float)):
        return "the scale is not a constant"
    if (
        a.dim() != 2
        or b.dim() != 2
        or a.shape[0] != b.shape[1]
        or tuple(weight.shape) != (b.shape[0], a.shape[1])
        or value(match.node("eye")).shape[1] != a.shape[1]
    ):
        return "the adapter's shapes do not fit the weight's"
    return None


def _build(weight, a, b, scale, match):
    given = [
        proxy.detach() if value(match.bound[name]).requires_grad else proxy
        for name, proxy in (("weight", weight), ("a", a), ("b", b))
    ]
    return adapted_norm(*given, float(scale), dtype_of(match.outputs[0]))


@rewrite("adapted_norm", to=_build, where=_whole)
def norm(weight, a, b, scale, size, device, dtype):
    delta = linear(linear(torch.eye(size, device=device, dtype=dtype), a, None), b, None)
    return cast(torch.linalg.norm(weight + scale * cast(delta.T).detach(), dim=1)).detach()


def anchors(graph):
    """An identity that a linear reads."""
    return [
        node for node in graph.nodes if node.target is torch.eye and any(user.target is linear for user in node.users)
    ]


PASS = recognize("dora", [norm], anchors)
