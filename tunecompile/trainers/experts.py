"""Experts that get no token: those whose gradients are zero in every step that is looked at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_LISTED = re.compile(r"(.*\bexperts)\.(\d+)\..+")  #: a parameter of one of several modules
_STACKED = re.compile(r".*\bexperts\b.*")  #: a parameter of all experts, or of an adapter on one


class ExpertUse:
    """Which experts of a model had a gradient, in the steps that were looked at; on the device."""

    def __init__(self, model: nn.Module):
        self.looks = 0
        self.used: dict[str, Tensor] = {}  #: experts, by the name of their stack or list
        self._listed: dict[str, list[tuple[int, nn.Parameter]]] = {}
        self._stacked: dict[str, tuple[nn.Parameter, int]] = {}  #: with the number of experts, 0: it is the first size
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if listed := _LISTED.fullmatch(name):
                self._listed.setdefault(listed[1], []).append((int(listed[2]), parameter))
            elif _STACKED.fullmatch(name) and parameter.dim() == 3:
                self._stacked[name] = parameter, 0
            elif _STACKED.fullmatch(name) and ".lora_B." in name and (count := _experts_under(model, name)):
                self._stacked[name] = parameter, count

    @torch.no_grad()
    def look(self) -> None:
        """Look at the gradients of this step."""
        self.looks += 1
        for name, used in self._used_now():
            self.used[name] = self.used[name] | used if name in self.used else used

    def _used_now(self) -> Iterator[tuple[str, Tensor]]:
        for name, (parameter, experts) in self._stacked.items():
            grad = parameter.grad
            if grad is None or hasattr(grad, "to_local"):
                continue
            # columns of PEFT's B: those of one expert are as far apart as there are experts
            by_expert = grad.reshape(grad.shape[0], -1, experts).permute(2, 0, 1) if experts else grad
            yield name, by_expert.flatten(1).any(1)
        for name, listed in self._listed.items():
            device = listed[0][1].device
            used = torch.zeros(1 + max(number for number, _ in listed), dtype=torch.bool, device=device)
            for number, parameter in listed:
                if parameter.grad is not None:
                    used[number] |= parameter.grad.any()
            if not any(hasattr(parameter.grad, "to_local") for _, parameter in listed):
                yield name, used

    def idle(self) -> Tensor | None:
        """How many experts had no gradient, of each stack or list; None where nothing has experts."""
        counts = [(~used).sum() for used in self.used.values()]
        return torch.stack([count.to(counts[0].device) for count in counts]) if counts else None

    def names(self) -> list[str]:
        """What `idle` counts, in its order."""
        return list(self.used)


def _experts_under(model: nn.Module, name: str) -> int:
    """The number of experts whose stack an adapter is for; 0 where it is for a linear."""
    wrapper: Any = model.get_submodule(name.partition(".lora_B.")[0])
    count = getattr(wrapper, "num_experts", 0)
    return count if isinstance(count, int) and count > 1 else 0
