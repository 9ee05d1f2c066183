"""A norm without weights that is scaled and shifted by row of the batch (adaLN), and the residual sum before it.

The norms themselves are ops by now, however the model spells them. The 1 that is added to a scale is part of the match,
or stays where the model adds it: before a view, or for several norms.
"""

import operator
from typing import Any

import torch

from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.match import Match
from tunecompile.ir.rewrite import Rewrite, rewrite
from tunecompile.ops import add_modulated_norm, layer_norm, modulated_norm, rms_norm
from tunecompile.ops.norms.rms_norm import compute_dtype
from tunecompile.passes.recognize.norms.residual import alike, in_one_dtype, joined

__all__ = ["ADD", "PASS"]


def _is_by_row(given: Any, x: torch.Tensor) -> bool:
    """Whether it belongs to rows of a batch x, [..., T, H]: [..., 1, H], each leading size 1 or x's."""
    if not isinstance(given, torch.Tensor) or given.dim() != x.dim() or x.dim() < 2:
        return False
    lead = all(size in (1, whole) for size, whole in zip(given.shape[:-2], x.shape[:-2]))
    return lead and tuple(given.shape[-2:]) == (1, x.shape[-1])


def _fits(match: Match) -> str | None:
    x, out = value(match.bound["x"]), match.outputs[0]
    for name in ("scale", "shift"):
        if not _is_by_row(value(match.bound[name]), x):
            return f"the {name} does not belong to rows of the batch"
    return "the result is in fp64" if dtype_of(out) == torch.float64 != x.dtype else None


def _widened(match: Match) -> str | None:
    x, out = match.bound["x"], match.bound["out"]
    if not isinstance(out, torch.dtype):
        return "a cast may move to another device"
    given = (match.bound["dtype"], out)
    fits = given[0] == compute_dtype(dtype_of(x)) and out.is_floating_point
    return None if fits else f"the result is {given[0]} before it is cast"


def _rewrites(norm: str, centred: bool, whole: Any, factor: Any) -> list[Rewrite]:
    """For patterns of a norm that is scaled by 1 + scale, and by a factor."""

    def to(offset: float) -> Any:
        def build(x: Any, scale: Any, shift: Any, eps: Any, match: Match) -> Any:
            return modulated_norm(x, scale, shift, eps, offset, centred, dtype_of(match.outputs[0]))

        return build

    return [
        rewrite(f"modulated_{norm}", to=to(1.0), where=_fits)(whole),
        rewrite(f"modulated_{norm}_by_factor", to=to(0.0), where=_fits)(factor),
    ]


def _layer(x, eps, dtype):
    return layer_norm(x, None, None, eps, dtype)


def _rms(x, eps):
    return rms_norm(x, x.new_ones(x.shape[-1]), eps, 0.0, False)


def _cast(x, scale, shift, eps, offset, centred, out):
    return modulated_norm(x, scale, shift, eps, offset, centred, out)


@rewrite("modulated_then_rounded", to=_cast, where=_widened)
def rounded(x, scale, shift, eps, offset, centred, dtype, out):
    return modulated_norm(x, scale, shift, eps, offset, centred, dtype).to(out)


_SPELLINGS = [
    *_rewrites(
        "layer_norm",
        True,
        lambda x, eps, dtype, scale, shift: _layer(x, eps, dtype) * (1 + scale) + shift,
        lambda x, eps, dtype, scale, shift: _layer(x, eps, dtype) * scale + shift,
    ),
    *_rewrites(
        "rms_norm",
        False,
        lambda x, eps, scale, shift: _rms(x, eps) * (1 + scale) + shift,
        lambda x, eps, scale, shift: _rms(x, eps) * scale + shift,
    ),
]


def anchors(graph):
    """Norms without weights that are multiplied by what rows of the batch share."""
    norms = {layer_norm.overload, rms_norm.overload}
    return [
        node
        for node in graph.nodes
        if node.target in norms
        and getattr(node.args[1], "target", None) in (None, "new_ones")
        and any(
            user.target is operator.mul and any(_is_by_row(value(side), value(node)) for side in user.args)
            for user in node.users
        )
    ]


def _build(x, residual, scale, shift, eps, offset, centred, dtype):
    made = add_modulated_norm(*in_one_dtype(x, residual), scale, shift, eps, offset, centred, dtype)
    return made[0], made[1]


@rewrite("add_modulated_norm", to=_build, where=alike)
def residual_norm(x, residual, scale, shift, eps, offset, centred, dtype):
    total = x + residual
    return modulated_norm(total, scale, shift, eps, offset, centred, dtype), total


PASS = recognize("modulated_norm", [*_SPELLINGS, rounded], anchors, requires=frozenset({"layer_norm", "rms_norm"}))
ADD = joined(modulated_norm, residual_norm)
