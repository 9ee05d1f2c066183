"""Kernels of fla and mamba_ssm as providers of ops, called from compiled code without a graph break.

A package's function is differentiable, so an op of ours calls it in the forward, and again, with a graph of its own,
in the backward. These providers stand behind ours. `tunecompile.passes.plan.rivals` puts one in front where it is right
and faster on the GPU at hand.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch import known_bugs
from tunecompile._torch.card import compiled_for
from tunecompile._torch.fake_tensors import is_fake
from tunecompile.ir.op import Cost, Op, op, refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops import channel_delta_rule, gated_delta_rule, selective_scan


@dataclass(frozen=True)
class Rival:
    """A function of another package that computes an op. Initial states and documents stay with ours."""

    package: str  #: as it is imported
    distribution: str  #: as it is installed
    module: str  #: where the function is
    function: str
    call: Callable[..., Sequence[Tensor]]  #: (function, the op's tensors, its numbers) -> what the op returns

    def load(self) -> Callable:
        return getattr(importlib.import_module(self.module), self.function)

    def refuse(self, x: Tensor, initial: Tensor | None, offsets: Tensor | None) -> Note | None:
        """Why it cannot run a call, or None."""
        if not _is_there(self.package):
            return note("package-not-installed", detail=self.package)
        if reason := refuse_gpu(x):
            return reason
        if initial is not None or offsets is not None:
            return note("state-or-documents")
        hopper = (compiled_for(x.device) or (0, 0))[0] == 9
        if self.package == "fla" and hopper and known_bugs.FLA_ON_HOPPER.present:
            return note("compiler-fails", detail=str(known_bugs.FLA_ON_HOPPER))
        return None


@functools.cache
def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _delta(function: Callable, tensors: Sequence[Tensor], numbers: Sequence[float]) -> Sequence[Tensor]:
    """fla's rules have as many heads of q and k as of v; eps is 1e-6 where they make their length 1."""
    q, k, v, g, beta = tensors
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return function(
        q, k, v, g=g, beta=beta, scale=numbers[0], output_final_state=True, use_qk_l2norm_in_kernel=numbers[1] > 0
    )


def _scan(function: Callable, tensors: Sequence[Tensor], numbers: Sequence[float]) -> Sequence[Tensor]:
    x, dt, a, b, c = tensors
    x, dt, b, c = (each.transpose(1, 2).contiguous() for each in (x, dt, b, c))
    made, final = function(x, dt, a, b, c, return_last_state=True)
    return made.transpose(1, 2), final


#: op -> the function. (mamba_ssm's scan of Mamba-2 makes decays of dt itself, and cannot be given those of the op.)
RIVALS: dict[str, Rival] = {
    "gated_delta_rule": Rival(
        "fla", "flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _delta
    ),
    "channel_delta_rule": Rival("fla", "flash-linear-attention", "fla.ops.kda", "chunk_kda", _delta),
    "selective_scan": Rival(
        "mamba_ssm", "mamba-ssm", "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", _scan
    ),
}
PACKAGES = {rival.package: rival.distribution for rival in RIVALS.values()}  #: names of these providers
_OPS = {each.name: each for each in (channel_delta_rule, gated_delta_rule, selective_scan)}
FLA_EPS = 1e-6


def _like(name: str, tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
    """Empty results: those of the op."""
    rest = (None, None, *numbers)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in _OPS[name].reference(*tensors, *rest)]


@op(cost=Cost.MATMUL, opaque=True)
def by_package(name: str, tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
    """Compute an op by another package's function.

    Args:
        name: of the op.
        tensors: its arguments before `initial`.
        numbers: those behind `offsets`.

    Returns:
        What the op returns.
    """
    if is_fake(tensors[0]):
        return _like(name, tensors, numbers)
    made = RIVALS[name].call(RIVALS[name].load(), tensors, numbers)
    return [made[0].to(tensors[0].dtype).contiguous().clone(), made[1].float().contiguous().clone()]


@op(cost=Cost.MATMUL, opaque=True)
def by_package_backward(
    name: str, grads: Sequence[Tensor], tensors: Sequence[Tensor], numbers: Sequence[float]
) -> list[Tensor]:
    """Compute an op's gradients by another package's function, which runs again.

    Args:
        name: of the op.
        grads: of what it returns.
        tensors, numbers: as given to `by_package`.

    Returns:
        The gradients of its tensors.
    """
    if is_fake(tensors[0]):
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        made = RIVALS[name].call(RIVALS[name].load(), leaves, numbers)
        given = [grad.to(x.dtype) for grad, x in zip(grads, made)]
        found = torch.autograd.grad(list(made), leaves, given)
    return [x.to(leaf.dtype).contiguous().clone() for x, leaf in zip(found, leaves)]


def register() -> None:
    """Make each function a provider of its op and of the op's backward, behind those that they have."""
    for name, rival in RIVALS.items():
        _register(_OPS[name], rival)


def _register(op: Op, rival: Rival) -> None:
    backward = op.backward_op
    assert backward is not None
    count = op.parameters.index("initial")
    because = f"{rival.package}'s kernels were measured to be faster"

    def refuses(*args: Any) -> Note | None:
        if op.name.endswith("delta_rule") and args[-1] not in (0.0, FLA_EPS):
            return note("arguments-not-supported")
        return rival.refuse(args[0], *args[count : count + 2])

    @op.provider(rival.package, refuses=refuses, because=because)
    def _(**given: Any) -> tuple:
        args = [given[name] for name in op.parameters]
        return tuple(by_package(op.name, args[:count], list(args[count + 2 :])))

    @backward.provider(rival.package, refuses=lambda *args: refuses(*args[2:]), because=because)
    def _(**given: Any) -> list:
        grads, args = [given[name] for name in backward.parameters[:2]], [given[name] for name in op.parameters]
        return [*by_package_backward(op.name, grads, args[:count], list(args[count + 2 :])), None]


register()
