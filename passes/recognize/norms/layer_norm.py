"""LayerNorm: torch's own, also between casts, and written out (Cohere); and a residual add followed by LayerNorm.

The op gives the dtype that is read: under autocast on a GPU torch's own gives fp32 for x in half precision, and a cast
back that alone reads it becomes part of the op."""

import torch
import torch.nn.functional as F

from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.match import Match, cast
from tunecompile.ir.rewrite import rewrite
from tunecompile.ops import add_layer_norm, layer_norm
from tunecompile.ops.norms.rms_norm import compute_dtype
from tunecompile.passes.recognize.norms.residual import alike, in_one_dtype, joined

__all__ = ["ADD", "PASS"]


def _fits(match: Match) -> str | None:
    """Require a constant eps, weight and bias of the last dimension's length, and a result in x's dtype or the op's.

    Other casts of the result stay: the planner recomputes them with what they are of.
    """
    x, out = match.bound["x"], match.outputs[0]
    if any(node.target == "to" and not isinstance(node.args[1], torch.dtype) for node in match.nodes.values()):
        return "a cast may move to another device"
    if not isinstance(match.bound["eps"], float):
        return "eps is not a constant"
    if not value(x).is_floating_point() or dtype_of(out) not in (dtype_of(x), compute_dtype(dtype_of(x))):
        return f"the result is {dtype_of(out)}, x is {dtype_of(x)}"
    for name in ("weight", "bias"):
        given = match.bound.get(name)
        if given is not None and tuple(value(given).shape) != (value(x).shape[-1],):
            return f"the {name} is no vector over the last dimension"
    return None if len(match.bound.get("shape", (0,))) == 1 else "normalised over several dimensions"


def _of_torch(match: Match) -> str | None:
    """Require that torch computes as the op does: from x as it is, in fp32, and rounded once.

    torch sums in fp32 where it returns x's dtype, too. Under autocast on a GPU it returns fp32.
    """
    x, norm = match.bound["x"], match.node("layer_norm")
    given, wide = norm.args[0], compute_dtype(dtype_of(x))
    if given is not x and dtype_of(given) != wide:
        return f"x is rounded to {dtype_of(given)} before"
    rounded_by_torch = norm is match.outputs[0] and dtype_of(norm) == dtype_of(x)
    if dtype_of(norm) != wide and not rounded_by_torch:
        return f"the norm is rounded to {dtype_of(norm)} before it is cast"
    return _fits(match)


def _written_in_fp32(match: Match) -> str | None:
    wide, out = compute_dtype(dtype_of(match.bound["x"])), match.outputs[0]
    if (given := dtype_of(match.node("sub"))) != wide:  # not the root, which autocast computes in fp32
        return f"statistics are computed in {given}"
    scaled = out.args[0] if out.target == "to" else out
    return f"the scaled value is {dtype_of(scaled)}" if dtype_of(scaled) != wide else _fits(match)


def _as_op(x, weight, bias, eps, match):
    return layer_norm(x, weight, bias, eps, dtype_of(match.outputs[0]))  # by position, as passes read its arguments


@rewrite("layer_norm_of_casts", to=_as_op, where=_of_torch)
def between_casts(x, shape, weight, bias, eps, dtype):
    return F.layer_norm(cast(x), shape, weight, bias, eps).to(dtype)


@rewrite("layer_norm", to=_as_op, where=_of_torch)
def torch_norm(x, shape, weight, bias, eps):
    return F.layer_norm(cast(x), shape, weight, bias, eps)


def _scaled(centred, other, weight, eps):
    return cast(weight) * (centred * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + eps))


def _written(x, weight, eps):
    """The mean is taken off twice, as Cohere does, so that each is a node of its own."""
    wide = cast(x)
    mean = wide.mean(-1, keepdim=True)
    return _scaled(wide - mean, wide - mean, weight, eps)


def _shared(x, weight, eps):
    wide = cast(x)
    centred = wide - wide.mean(-1, keepdim=True)
    return _scaled(centred, centred, weight, eps)


def _without_bias(x, weight, eps, match):
    return _as_op(x, weight, None, eps, match)


_WRITTEN = [
    rewrite("written_out_then_rounded", to=_without_bias, where=_written_in_fp32)(
        lambda x, weight, eps, dtype: _written(x, weight, eps).to(dtype)
    ),
    rewrite("written_out", to=_without_bias, where=_written_in_fp32)(_written),
    rewrite("shared_then_rounded", to=_without_bias, where=_written_in_fp32)(
        lambda x, weight, eps, dtype: _shared(x, weight, eps).to(dtype)
    ),
    rewrite("shared", to=_without_bias, where=_written_in_fp32)(_shared),
]


def anchors(graph):
    """torch's calls, and roots of variances: of a mean of squares of what a mean was taken off."""
    return [node for node in graph.nodes if node.op == "call_function" and _is_anchor(node)]


def _is_anchor(node):
    if node.target is F.layer_norm:
        return True
    if node.target is not torch.rsqrt:
        return False
    for name in ("add", "mean", "pow", "sub"):
        node = node.args[0] if node.args else None  # an operand by its keyword is not among them
        if not isinstance(node, torch.fx.Node) or getattr(node.target, "__name__", node.target) != name:
            return False
    return True


def _build(x, residual, weight, bias, eps, dtype):
    made = add_layer_norm(*in_one_dtype(x, residual), weight, bias, eps, dtype)
    return made[0], made[1]


@rewrite("add_layer_norm", to=_build, where=alike)
def residual_norm(x, residual, weight, bias, eps, dtype):
    total = x + residual
    return layer_norm(total, weight, bias, eps, dtype), total


PASS = recognize("layer_norm", [between_casts, torch_norm, *_WRITTEN], anchors)
ADD = joined(layer_norm, residual_norm)
