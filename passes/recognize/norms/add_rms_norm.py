"""A residual add followed by a norm becomes one op: each input is read once, and one pass adds both gradients."""

from tunecompile.ir.rewrite import rewrite
from tunecompile.ops import add_rms_norm, rms_norm
from tunecompile.passes.recognize.norms.residual import alike, in_one_dtype, joined

__all__ = ["PASS"]


def _build(x, residual, weight, eps, offset, round_first):
    made = add_rms_norm(*in_one_dtype(x, residual), weight, eps, offset, round_first)
    return made[0], made[1]


@rewrite("add_rms_norm", to=_build, where=alike)
def residual_norm(x, residual, weight, eps, offset, round_first):
    total = x + residual
    return rms_norm(total, weight, eps, offset, round_first), total


PASS = joined(rms_norm, residual_norm)
