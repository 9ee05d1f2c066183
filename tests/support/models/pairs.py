"""Small models beside themselves: one optimized, one as it was, with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

import tunecompile
from tests.support import zoo


def small(family: str = "llama", **changes) -> nn.Module:
    return zoo.make(family, num_hidden_layers=2, **changes)


def pair(build: Callable[[], nn.Module] = small, **options) -> tuple[nn.Module, nn.Module]:
    """(optimized with these options, as it was), with the same weights."""
    reference = build().train()
    return optimized(copy.deepcopy(reference), **options), reference


def optimized(model: nn.Module, **options) -> nn.Module:
    """Operations one by one: code is generated in few tests, since it takes long on a CPU."""
    return tunecompile.optimize(model, **{"executor": "eager", **options})


def compiled_slots(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module._compiled_call_impl is not None]


def checkpoint(model: nn.Module, **kwargs) -> None:
    """Switch checkpointing on, as the installed transformers calls it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
