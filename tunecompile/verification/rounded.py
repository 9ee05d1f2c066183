"""Eager with frozen products in 8 bits: the yardstick of a model that is optimized for them.

It is written apart from `tunecompile.ops.eight_bits`, whose faults it is to find: rows are rounded where a frozen layer
under an adapter reads them, and gradients where they reach it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.ir.op import formats
from tunecompile.ops.eight_bits import FORMATS, EightBits

#: times what rounding is off by. Weights keep their values, so that packed ones need not be read: theirs would be off
#: by as much, independently, which makes a factor of sqrt(2); the rest is the scatter of parameters on one batch
SLACK = 3.0


def format_on(precision: str | None, dtype: torch.dtype, device: torch.device) -> EightBits | None:
    """Return the format of 8 bits that a precision means for activations of a dtype, or None."""
    like = torch.empty(0, dtype=dtype, device=device)
    named = {eight.name: eight for eight in FORMATS}
    return next((named[name] for name in formats(precision) if named[name].refuses(like) is None), None)


def round_products(model: nn.Module, eight: EightBits) -> nn.Module:
    """Have the frozen layers under adapters of an eager model round what they read, and their gradients; return it."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module) and not any(p.requires_grad for p in base.parameters(recurse=False)):
            base.register_forward_pre_hook(lambda _, args: (_forward(args[0], eight), *args[1:]))
            base.register_forward_hook(lambda _, args, out: _Backward.apply(out, eight))
    return model


def _forward(x: Tensor, eight: EightBits) -> Tensor:
    """x, rounded; its gradient is passed on as it is. (An embedding reads integers.)"""
    return x + (_rounded(x, eight) - x).detach() if x.is_floating_point() else x


class _Backward(torch.autograd.Function):
    """A result as it is, whose gradient is rounded."""

    @staticmethod
    def forward(context: Any, y: Tensor, eight: EightBits) -> Tensor:
        context.eight = eight
        return y.view_as(y)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _rounded(grads[0], context.eight), None


def _rounded(x: Tensor, eight: EightBits) -> Tensor:
    """x, off by `SLACK` times what 8 bits with a scale for each row are off by."""
    values = x.detach().float()
    largest = values.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    if eight.name == "int8":
        near = (values * (127 / largest)).round() * (largest / 127)
    else:
        near = (values * (448 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448)
    return (values + SLACK * (near - values)).to(x.dtype)
