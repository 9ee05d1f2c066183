"""Low-rank adapters of a frozen linear, as PEFT writes them.

With or without casts, dropout, biases, rank scaling and magnitudes, in any spelling of the linear.
"""

import torch
import torch.nn.functional as F

from tunecompile._torch.modules import linear
from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.match import Match, cast
from tunecompile.ir.rewrite import rewrite
from tunecompile.ops import lora_linear
from tunecompile.ops.frozen_weights import DENSE

__all__ = ["PASS"]


def _fits(match: Match) -> str | None:
    bound, base = match.bound, _base(match)
    a, b, weight = value(bound["a"]), value(bound["b"]), value(bound["weight"])
    outputs, inputs = weight.shape if base.target is linear else reversed(weight.shape)
    if not isinstance(bound["scale"], (int, float)):
        return "the scale is not a constant"
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or b.shape[0] != outputs or a.shape[1] != inputs:
        return "the adapter's shapes do not fit the weight's"
    if value(bound["adapter_input"]).shape != value(bound["x"]).shape:
        return "the adapter's input has another shape"
    if weight.requires_grad:
        return "the base weight is trained as well"
    if any(not _is_bias(value(each), outputs) for each in (bound.get("bias"), bound.get("own_bias"))):
        return "the bias is no vector"
    return None


def _is_bias(bias, outputs: int) -> bool:
    return bias is None or (
        isinstance(bias, torch.Tensor) and tuple(bias.shape) == (outputs,) and bias.is_floating_point()
    )


def _adapter(match: Match) -> str | None:
    base = _base(match)
    if (reason := _fits(match)) is None and dtype_of(match.outputs[0]) != dtype_of(base):
        return f"base is {dtype_of(base)}, the sum is {dtype_of(match.outputs[0])}"
    return reason


def _rows(match: Match) -> str | None:
    return _are_tokens(match) or _adapter(match)


def _are_tokens(match: Match) -> str | None:
    """Check that the rows that are multiplied are the tokens of x, and that the result has x's leading shape."""
    x, rows, made = value(match.bound["x"]), value(match.node("view")), value(match.node("view_1"))
    if rows.shape[-1] != x.shape[-1] or tuple(made.shape[:-1]) != tuple(x.shape[:-1]):
        return "the product's rows are not those of x"
    return None


def _magnitudes(match: Match) -> str | None:
    """Check that each column is multiplied by one number. The sum may have the magnitudes' dtype."""
    magnitude = value(match.bound["magnitude"])
    if (
        not isinstance(magnitude, torch.Tensor)
        or magnitude.dim() > 2
        or tuple(magnitude.shape[-1:]) != tuple(value(_base(match)).shape[-1:])
        or magnitude.numel() != magnitude.shape[-1]
    ):
        return "the magnitudes are not one a column"
    return _fits(match)


def _rows_and_magnitudes(match: Match) -> str | None:
    return _are_tokens(match) or _magnitudes(match)


def _base(match: Match):
    """The base product: the one that reads the base weight."""
    weight = match.bound["weight"]
    return next(
        node
        for node in match.nodes.values()
        if (node.target, node.args[1:2]) == (linear, (weight,))
        or (node.target, node.args[2:]) == (torch.addmm, (weight,))
    )


def _build(x, weight, bias, a, b, scale, adapter_input, own_bias, match):
    if own_bias is not None:  # scaled like the adapter's product; added before rounding
        given = dtype_of(match.bound["own_bias"])
        own_bias = _to(own_bias, given, torch.promote_types(given, torch.float32)) * scale
        bias = own_bias if bias is None else bias + own_bias
    return _product(x, weight, bias, a, b, scale, adapter_input, match)


def _build_with_magnitudes(x, weight, bias, a, b, scale, adapter_input, magnitude, match):
    """Build m times the adapted product, rounded once, for (m - 1) base + m delta. The bias is not multiplied."""
    made, dtype = (
        _product(x, weight, None, a, b, scale, adapter_input, match) * magnitude,
        torch.promote_types(dtype_of(_base(match)), dtype_of(match.bound["magnitude"])),
    )
    if bias is not None:
        made, dtype = made + bias, torch.promote_types(dtype, dtype_of(match.bound["bias"]))
    return _to(made, dtype, dtype_of(match.outputs[0]))


def _product(x, weight, bias, a, b, scale, adapter_input, match):
    base, source = _base(match), match.bound["x"]
    dtype = dtype_of(base)
    down = next(node for node in match.nodes.values() if node.target is linear and node.args[1] is match.bound["a"])
    if base.target is torch.addmm:
        weight = weight.t()
    own = (
        []
        if _source(match.bound["adapter_input"]) is _source(source)
        else [_to(adapter_input, dtype_of(match.bound["adapter_input"]), dtype_of(down))]
    )
    rows = _to(x, dtype_of(source), dtype)
    made = lora_linear(
        rows,
        own,
        [_to(weight, dtype_of(match.bound["weight"]), dtype)],
        [] if bias is None else [bias],
        [a],
        [b],
        [float(scale)],
        torch.promote_types(dtype_of(down), dtype),
        DENSE,
    )  # where x is wider than the adapters, casting them is cheaper and more exact
    return made[0]


def _to(symbol, given, wanted):
    return symbol if given == wanted else symbol.to(wanted)


def _source(node):
    """The node of which this one is a cast."""
    while node.op == "call_method" and node.target == "to" and len(node.args) == 2:
        node = node.args[0]
    return node


def _delta(adapter_input, a, b, scale, own_bias):
    return cast(linear(linear(cast(adapter_input), a, None), b, own_bias) * scale)


@rewrite("adapter_then_rounded", to=_build, where=_adapter)
def then_rounded(x, weight, bias, a, b, scale, adapter_input, own_bias, dtype):
    return (cast(linear(cast(x), weight, bias)) + _delta(adapter_input, a, b, scale, own_bias)).to(dtype)


@rewrite("adapter", to=_build, where=_adapter)
def adapter(x, weight, bias, a, b, scale, adapter_input, own_bias):
    return cast(linear(cast(x), weight, bias)) + _delta(adapter_input, a, b, scale, own_bias)


@rewrite("adapter_behind_bias_then_rounded", to=_build, where=_adapter)
def behind_bias_then_rounded(x, weight, bias, a, b, scale, adapter_input, own_bias, dtype):
    return (cast(linear(cast(x), weight, None) + bias) + _delta(adapter_input, a, b, scale, own_bias)).to(dtype)


@rewrite("adapter_behind_bias", to=_build, where=_adapter)
def behind_bias(x, weight, bias, a, b, scale, adapter_input, own_bias):
    """The bias is added to a product with a transposed weight (Falcon)."""
    return cast(linear(cast(x), weight, None) + bias) + _delta(adapter_input, a, b, scale, own_bias)


@rewrite("adapter_of_rows_then_rounded", to=_build, where=_rows)
def of_rows_then_rounded(x, weight, bias, a, b, scale, adapter_input, own_bias, width, shape, dtype):
    return (
        cast(torch.addmm(bias, cast(x).view(-1, width), weight).view(shape))
        + _delta(adapter_input, a, b, scale, own_bias)
    ).to(dtype)


@rewrite("adapter_of_rows", to=_build, where=_rows)
def of_rows(x, weight, bias, a, b, scale, adapter_input, own_bias, width, shape):
    """The weight is [in, out], and tokens are rows (GPT-2)."""
    return cast(torch.addmm(bias, cast(x).view(-1, width), weight).view(shape)) + _delta(
        adapter_input, a, b, scale, own_bias
    )


def _magnified(base, unbiased, a, b, scale, adapter_input, magnitude):
    delta = linear(linear(cast(adapter_input), a, None), b, None)
    return base + ((magnitude - 1) * unbiased + magnitude * delta * scale)


@rewrite("adapter_with_magnitudes", to=_build_with_magnitudes, where=_magnitudes)
def with_magnitudes(x, weight, bias, a, b, scale, adapter_input, magnitude):
    """DoRA."""
    base = cast(linear(cast(x), weight, bias))
    return _magnified(base, base - bias, a, b, scale, adapter_input, magnitude)


@rewrite(
    "adapter_with_magnitudes_without_bias",
    to=lambda x, weight, a, b, scale, adapter_input, magnitude, match: _build_with_magnitudes(
        x, weight, None, a, b, scale, adapter_input, magnitude, match
    ),
    where=_magnitudes,
)
def with_magnitudes_without_bias(x, weight, a, b, scale, adapter_input, magnitude):
    base = cast(linear(cast(x), weight, None))
    return _magnified(base, base, a, b, scale, adapter_input, magnitude)


@rewrite("adapter_of_rows_with_magnitudes", to=_build_with_magnitudes, where=_rows_and_magnitudes)
def of_rows_with_magnitudes(x, weight, bias, a, b, scale, adapter_input, width, shape, magnitude):
    base = cast(torch.addmm(bias, cast(x).view(-1, width), weight).view(shape))
    return _magnified(base, base - bias, a, b, scale, adapter_input, magnitude)


def anchors(graph):
    """A linear whose only user is another, wider linear, perhaps behind dropout: the product with A."""
    found = []
    for node in graph.nodes:
        if node.target is linear and len(node.users) == 1:
            inner, (user,) = node, node.users
            if user.target is F.dropout and len(user.users) == 1:
                inner, (user,) = user, user.users
            if user.target is linear and user.args[0] is inner:
                found.append(node)
    return found


PASS = recognize(
    "lora",
    [
        then_rounded,
        behind_bias_then_rounded,
        of_rows_then_rounded,
        adapter,
        behind_bias,
        of_rows,
        with_magnitudes,
        with_magnitudes_without_bias,
        of_rows_with_magnitudes,
    ],
    anchors,
)
