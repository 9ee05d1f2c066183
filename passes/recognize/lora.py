"""Low-rank adapters beside a frozen linear, in any of its spellings, as PEFT writes them: with or without casts, dropout, bias and rank scaling."""

import torch
import torch.nn.functional as F

from tunecompile.canonical import dtype_of, value
from tunecompile.match import Match, cast
from tunecompile.ops import lora_linear
from tunecompile.pipeline import recognize
from tunecompile.rewrite import rewrite

__all__ = ["PASS"]


def _adapter(match: Match) -> str | None:
    bound, base = match.bound, _base(match)
    a, b, weight, bias = value(bound["a"]), value(bound["b"]), value(bound["weight"]), value(bound["bias"])
    outputs, inputs = weight.shape if base.target is F.linear else reversed(weight.shape)
    if not isinstance(bound["scale"], (int, float)):
        return "the scale is not a constant"
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or b.shape[0] != outputs or a.shape[1] != inputs:
        return "the adapter's shapes do not fit the weight's"
    if value(bound["adapter_input"]).shape != value(bound["x"]).shape:
        return "the adapter's input has another shape"
    if weight.requires_grad:
        return "the base weight is trained as well"
    if bias is not None and (not isinstance(bias, torch.Tensor) or tuple(bias.shape) != (outputs,) or not bias.is_floating_point()):
        return "the bias is no vector"
    if dtype_of(match.outputs[0]) != dtype_of(base):
        return f"base is {dtype_of(base)}, the sum is {dtype_of(match.outputs[0])}"
    return None


def _rows(match: Match) -> str | None:
    """Whether what is multiplied are the tokens of x, and the product has x's shape again."""
    x, rows, made = value(match.bound["x"]), value(match.node("view")), value(match.node("view_1"))
    if rows.shape[-1] != x.shape[-1] or tuple(made.shape[:-1]) != tuple(x.shape[:-1]):
        return "the product's rows are not those of x"
    return _adapter(match)


def _base(match: Match):
    """The base product: the one that reads the base weight."""
    weight = match.bound["weight"]
    return next(node for node in match.nodes.values() if (node.target, node.args[1:2]) == (F.linear, (weight,)) or (node.target, node.args[2:]) == (torch.addmm, (weight,)))


def _build(x, weight, bias, a, b, scale, adapter_input, match):
    base = _base(match)
    dtype = dtype_of(base)
    down = next(node for node in match.nodes.values() if node.target is F.linear and node.args[1] is match.bound["a"])
    source = match.bound["x"]
    if base.target is torch.addmm:
        weight = weight.t()

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


def _delta(adapter_input, a, b, scale):
    return cast(F.linear(F.linear(cast(adapter_input), a, None), b, None) * scale)


@rewrite("adapter_then_rounded", to=_build, where=_adapter)
def then_rounded(x, weight, bias, a, b, scale, adapter_input, dtype):
    return (cast(F.linear(cast(x), weight, bias)) + _delta(adapter_input, a, b, scale)).to(dtype)


@rewrite("adapter", to=_build, where=_adapter)
def adapter(x, weight, bias, a, b, scale, adapter_input):
    return cast(F.linear(cast(x), weight, bias)) + _delta(adapter_input, a, b, scale)


@rewrite("adapter_behind_bias_then_rounded", to=_build, where=_adapter)
def behind_bias_then_rounded(x, weight, bias, a, b, scale, adapter_input, dtype):
    return (cast(F.linear(cast(x), weight, None) + bias) + _delta(adapter_input, a, b, scale)).to(dtype)


@rewrite("adapter_behind_bias", to=_build, where=_adapter)
def behind_bias(x, weight, bias, a, b, scale, adapter_input):
    """The bias is added to a product with a transposed weight (Falcon)."""
    return cast(F.linear(cast(x), weight, None) + bias) + _delta(adapter_input, a, b, scale)


@rewrite("adapter_of_rows_then_rounded", to=_build, where=_rows)
def of_rows_then_rounded(x, weight, bias, a, b, scale, adapter_input, width, shape, dtype):
    return (cast(torch.addmm(bias, cast(x).view(-1, width), weight).view(shape)) + _delta(adapter_input, a, b, scale)).to(dtype)


@rewrite("adapter_of_rows", to=_build, where=_rows)
def of_rows(x, weight, bias, a, b, scale, adapter_input, width, shape):
    """The weight is [in, out], and tokens are rows (GPT-2)."""
    return cast(torch.addmm(bias, cast(x).view(-1, width), weight).view(shape)) + _delta(adapter_input, a, b, scale)


def anchors(graph):
    """A linear that only another, wider linear reads: the way down to the rank."""
    found = []
    for node in graph.nodes:
        if node.target is F.linear and len(node.users) == 1:
            (user,) = node.users
            if user.target is F.linear and user.args[0] is node:
                found.append(node)
    return found


PASS = recognize("lora", [then_rounded, behind_bias_then_rounded, of_rows_then_rounded, adapter, behind_bias, of_rows], anchors)
