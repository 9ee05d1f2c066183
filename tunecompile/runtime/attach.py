"""What `optimize` and `restore` do to a model."""

from __future__ import annotations

import os

from torch import nn

from tunecompile._torch.inductor import start_compile_workers
from tunecompile._torch.lookup import notes, warn, why_off
from tunecompile.compiler.compile_cache import link_read_only
from tunecompile.runtime.model_state import ATTRIBUTE, Settings, State, is_optimized, state_of
from tunecompile.runtime.parts import PARTS


def attach(model: nn.Module, settings: Settings) -> nn.Module:
    """Optimize a model in place. Does nothing to one that is optimized, or where TUNECOMPILE=0.

    Args:
        model: in place.
        settings: the passes, and the arguments of `optimize`.

    Returns:
        `model` itself.
    """
    if os.environ.get("TUNECOMPILE") == "0" or is_optimized(model):
        return model
    state = State(model, settings, PARTS)
    if not _can_compile():
        model.__dict__[ATTRIBUTE] = state  # with nothing attached, for the report, which says why
        return model
    compiles = settings.executor == "inductor"
    linked = link_read_only() if compiles else []
    if compiles and any(parameter.is_cuda for parameter in model.parameters()):
        start_compile_workers()
    state.notes += linked
    state.attach()
    model.__dict__[ATTRIBUTE] = state
    return model


def _can_compile() -> bool:
    """Whether torch has every name that compiling requires. Lost names are logged."""
    off = why_off()
    for line in (*([off] if off else []), *notes()):
        warn(line)
    return not off


def restore(model: nn.Module) -> nn.Module:
    """Undo `optimize` exactly: every slot, hook and checkpointing function is put back.

    Args:
        model: that was optimized, or a wrapper that adapters put around it since.

    Returns:
        `model` itself.

    Raises:
        NotOptimized: neither `model` nor the model its adapters wrap was optimized.
    """
    state = state_of(model)
    state.detach()
    del state.model.__dict__[ATTRIBUTE]  # `model` may be an adapter's wrapper, made after `optimize`
    return model
