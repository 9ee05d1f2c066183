"""Low-rank adapters beside a frozen linear, as PEFT writes them: with or without casts, dropout, bias and rank scaling."""

import torch
import torch.nn.functional as F

from tunecompile.canonical import dtype_of, value
from tunecompile.match import Match, cast
from tunecompile.ops import lora_linear
from tunecompile.pipeline import recognize
from tunecompile.rewrite import rewrite

__all__ = ["PASS"]


def _adapter(match: Match) -> str | None:
    bound = match.bound
    a, b, weight, bias = value(bound["a"]), value(bound["b"]), value(bound["weight"]), value(bound["bias"])
    if not isinstance(bound["scale"], (int, float)):
        return "the scale is not a constant"
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or b.shape[0] != weight.shape[0] or a.shape[1] != weight.shape[1]:
        return "the adapter's shapes do not fit the weight's"
    if value(bound["adapter_input"]).shape != value(bound["x"]).shape:
        return "the adapter's input has another shape"
    if weight.requires_grad:
        return "the base weight is trained as well"
    base = dtype_of(_base(match))
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.shape != weight.shape[:1]):
        return "the bias is no vector"
    if dtype_of(match.outputs[0]) != base:
        return f"base is {base}, the sum is {dtype_of(match.outputs[0])}"
    return None


def _base(match: Match):
    """The base product: the one linear that reads the base weight."""
    return next(node for node in match.nodes.values() if node.target is F.linear and node.args[1] is match.bound["weight"])


def _build(x, weight, bias, a, b, scale, adapter_input, match):
    base = _base(match)
    dtype = dtype_of(base)
    down = next(node for node in match.nodes.values() if node.target is F.linear and node.args[1] is match.bound["a"])
    source = match.bound["x"]

    def to(node, symbol, wanted):
        return symbol if dtype_of(node) == wanted else symbol.to(wanted)

    own = [] if _source(match.bound["adapter_input"]) is _source(source) else [to(match.bound["adapter_input"], adapter_input, dtype_of(down))]
    rows = to(source, x, dtype)
    made = lora_linear(rows, own, [to(match.bound["weight"], weight, dtype)], [] if bias is None else [bias], [a], [b], [float(scale)],
                       torch.promote_types(dtype_of(down), dtype))  # where x is wider than the adapters, casting them is cheaper and more exact
    return made[0]


def _source(node):
    """What a node is a cast of."""
    while node.op == "call_method" and node.target == "to" and len(node.args) == 2:
        node = node.args[0]
    return node


@rewrite("adapter_then_rounded", to=_build, where=_adapter)
def then_rounded(x, weight, bias, a, b, scale, adapter_input, dtype):
    delta = cast(F.linear(F.linear(cast(adapter_input), a, None), b, None) * scale)
    return (cast(F.linear(cast(x), weight, bias)) + delta).to(dtype)


@rewrite("adapter", to=_build, where=_adapter)
def adapter(x, weight, bias, a, b, scale, adapter_input):
    delta = cast(F.linear(F.linear(cast(adapter_input), a, None), b, None) * scale)
    return cast(F.linear(cast(x), weight, bias)) + delta


def anchors(graph):
    """A linear that only another, wider linear reads: the way down to the rank."""
    found = []
    for node in graph.nodes:
        if node.target is F.linear and len(node.users) == 1:
            (user,) = node.users
            if user.target is F.linear and user.args[0] is node:
                found.append(node)
    return found


PASS = recognize("lora", [then_rounded, adapter], anchors)
