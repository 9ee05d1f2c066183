"""A reference that is the model with its adapters switched off, by the products that train it.

With adapters a linear is one product, of the base's columns and the adapters' together. Without them it is another,
whose sums are rounded otherwise, and a policy that has learnt nothing yet would differ from its reference: log-ratios
and KL of the first step are 0 only if both are the same bits. So adapters that PEFT has switched off are computed, and
scaled by 0, where a reference is scored beside training.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_KINDS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}


@dataclass(frozen=True, eq=False)
class SwitchedOff:
    """The linears with plain LoRA in a layer."""

    linears: tuple[weakref.ref[nn.Module], ...]

    @classmethod
    def of(cls, layer: nn.Module) -> SwitchedOff:
        return cls(
            tuple(
                weakref.ref(module)
                for module in layer.modules()
                if (type(module).__module__, type(module).__name__) in _KINDS
            )
        )

    @property
    def active(self) -> tuple[str, ...]:
        """The adapters that are active, as the first of the linears has them."""
        linear = self.linears[0]() if self.linears else None
        return () if linear is None else _active(vars(linear))

    @contextlib.contextmanager
    def scaled_by_0(self) -> Iterator[bool]:
        """Inside, linears whose adapters are switched off have them on, and scaled by 0, where that is the same.

        They require gradients, as they do in training: PEFT takes that from adapters that it switches off.

        Yields:
            Whether there are any.
        """
        before, frozen = [], []
        try:
            for linear in (reference() for reference in self.linears):
                if linear is not None and (names := _same(own := vars(linear))):
                    before.append((own, own["scaling"]))
                    own["_disable_adapters"], own["scaling"] = False, dict.fromkeys(own["scaling"], 0.0)
                    weights = [own["_modules"][part][name].weight for part in ("lora_A", "lora_B") for name in names]
                    frozen += [weight.requires_grad_() for weight in weights if not weight.requires_grad]
            yield bool(before)
        finally:
            for own, scaling in before:
                own["_disable_adapters"], own["scaling"] = True, scaling
            for weight in frozen:
                weight.requires_grad_(False)


def _active(own: dict[str, Any]) -> tuple[str, ...]:
    names = own.get("_active_adapter") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _same(own: dict[str, Any]) -> list[str]:
    """The active adapters of a linear that are switched off, if scaled by 0 they add 0."""
    modules = own["_modules"]
    if not own.get("_disable_adapters") or own.get("merged_adapters") or not {"lora_A", "lora_B"} <= modules.keys():
        return []
    active = [name for name in _active(own) if name in modules["lora_A"]]
    adds_0 = all(
        name in own["scaling"]
        and name not in own.get("lora_variant", {})
        and _keeps_all(modules["lora_dropout"][name])
        and _is_finite(modules["lora_A"][name].weight)
        for name in active
    )
    return active if adds_0 else []


def _keeps_all(dropout: nn.Module) -> bool:
    return isinstance(dropout, nn.Identity) or (isinstance(dropout, nn.Dropout) and dropout.p == 0)


def _is_finite(weight: torch.Tensor) -> bool:
    """Whether no product is infinite, as products in fp16 may be: 0 times that is no number."""
    device = weight.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return torch.float16 not in (autocast, weight.dtype)
