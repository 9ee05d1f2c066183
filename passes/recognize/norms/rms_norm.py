"""RMSNorm as models write it: rounded before the scale (Llama) or after it (OLMo), Gemma's 1 + w, and torch's own; and
a residual add followed by it.

Some norms have no weight (Gemma 4's of values, Llama 4's of queries and keys): these get one of ones."""

import torch
import torch.nn.functional as F

from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.match import Match, cast
from tunecompile.ir.rewrite import rewrite
from tunecompile.ops import add_rms_norm
from tunecompile.ops import rms_norm as op
from tunecompile.ops.norms.rms_norm import compute_dtype
from tunecompile.passes.recognize.norms.residual import alike, in_one_dtype, joined

__all__ = ["ADD", "PASS"]


def _norm(x, eps):
    wide = cast(x)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _wide(match: Match) -> str | None:
    """Require statistics in fp32 or wider, as the op computes them, and a weight as long as the last dimension."""
    x = match.bound["x"]
    if not isinstance(match.bound["eps"], float):
        return "eps is not a constant"
    if dtype_of(match.node("rsqrt")) != compute_dtype(dtype_of(x)):
        return f"statistics are computed in {dtype_of(match.node('rsqrt'))}"
    weight = value(match.bound["weight"]) if "weight" in match.bound else None
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != value(x).shape[-1]):
        return "the weight is no vector over the last dimension"
    return None


def _rounded_once(match: Match) -> str | None:
    """Require that the output has x's dtype: otherwise the op would round where the model does not."""
    if dtype_of(match.outputs[0]) != dtype_of(match.bound["x"]):
        return f"the result is {dtype_of(match.outputs[0])}, x is {dtype_of(match.bound['x'])}"
    return _wide(match)


def _rounded_first(match: Match) -> str | None:
    x, out = dtype_of(match.bound["x"]), dtype_of(match.outputs[0])
    normed = match.outputs[0].args
    if not any(dtype_of(side) == x and side is not match.bound["weight"] for side in normed):
        return "the normalised value is not rounded to x's dtype before it is scaled"
    if out != torch.promote_types(x, dtype_of(match.bound["weight"])):
        return f"the result is {out}"
    return _wide(match)


@rewrite("scaled_after_rounding", to=lambda x, weight, eps: op(x, weight, eps, 0.0, True), where=_rounded_first)
def after_rounding(x, weight, eps):
    return weight * cast(_norm(x, eps))


@rewrite(
    "offset_then_rounded",
    to=lambda x, weight, eps, offset: op(x, weight, eps, float(offset), False),
    where=_rounded_once,
)
def offset_cast(x, weight, eps, offset, dtype):
    return (_norm(x, eps) * (offset + cast(weight))).to(dtype)


@rewrite("offset", to=lambda x, weight, eps, offset: op(x, weight, eps, float(offset), False), where=_rounded_once)
def offset(x, weight, eps, offset):
    return _norm(x, eps) * (offset + cast(weight))


@rewrite("scaled_then_rounded", to=lambda x, weight, eps: op(x, weight, eps, 0.0, False), where=_rounded_once)
def then_rounded(x, weight, eps, dtype):
    return (cast(weight) * _norm(x, eps)).to(dtype)


def _unscaled(x, eps):
    return op(x, x.new_ones(x.shape[-1]), eps, 0.0, False)


@rewrite("unscaled_then_rounded", to=_unscaled, where=_rounded_once)
def unscaled_then_rounded(x, eps, dtype):
    return _norm(x, eps).to(dtype)


@rewrite("unscaled", to=_unscaled, where=_rounded_once)
def unscaled(x, eps):
    return _norm(x, eps)


def _torch_norm(match: Match) -> str | None:
    if not isinstance(match.bound["eps"], float):
        return "eps is not a constant"
    return None if len(match.bound["shape"]) == 1 else "normalised over several dimensions"


def _of_torch(x, weight, eps):
    return _unscaled(x, eps) if weight is None else op(x, weight, eps, 0.0, False)


@rewrite("torch_rms_norm", to=_of_torch, where=_torch_norm)
def torch_norm(x, shape, weight, eps):
    return F.rms_norm(x, shape, weight, eps)


def _build(x, residual, weight, eps, offset, round_first):
    made = add_rms_norm(*in_one_dtype(x, residual), weight, eps, offset, round_first)
    return made[0], made[1]


@rewrite("add_rms_norm", to=_build, where=alike)
def residual_norm(x, residual, weight, eps, offset, round_first):
    total = x + residual
    return op(total, weight, eps, offset, round_first), total


def anchors(graph):
    return [node for node in graph.nodes if node.target in (torch.rsqrt, F.rms_norm)]


#: 1 + w before w, which it could match as; those without a weight last
_REWRITES = [offset_cast, offset, then_rounded, after_rounding, torch_norm, unscaled_then_rounded, unscaled]
PASS = recognize("rms_norm", _REWRITES, anchors)
ADD = joined(op, residual_norm)
