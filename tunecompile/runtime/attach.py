"""What `optimize` and `restore` do to a model."""

from __future__ import annotations

import logging
import os

import torch
from torch import nn

from tunecompile._torch.card import VARIABLE, emulated, hold_to_memory
from tunecompile._torch.compile_workers import start_compile_workers
from tunecompile._torch.lookup import notes, warn, why_off
from tunecompile._torch.modules import slot_of
from tunecompile.compiler.compile_cache import link_read_only
from tunecompile.notes import Note, note
from tunecompile.planner.datasheets import find_gpu
from tunecompile.planner.device_memory import gauge_of
from tunecompile.runtime.model_state import ATTRIBUTE, Settings, State, is_optimized, state_of
from tunecompile.runtime.parts import PARTS
from tunecompile.runtime.step.state import Step

log = logging.getLogger("tunecompile")


def attach(model: nn.Module, settings: Settings) -> nn.Module:
    """Optimize a model in place. Does nothing to one that is optimized, or where TUNECOMPILE=0.

    What was optimized as a part of another model (adapters' first wrapper, where `model` is their second) is taken
    over: one set of slots and settings serves a module, those of the last call.

    Args:
        model: in place.
        settings: the passes, and the arguments of `optimize`.

    Returns:
        `model` itself.
    """
    if os.environ.get("TUNECOMPILE") == "0":
        return model
    if is_optimized(model):
        _tell_of_settings(state_of(model), settings)
        return model
    state = State(model, settings, PARTS)
    state.notes += _take_over(model)
    if not _can_compile():
        model.__dict__[ATTRIBUTE] = state  # with nothing attached, for the report, which says why
        return model
    state.notes += _behave_as(model)
    compiles = settings.executor == "inductor"
    linked = link_read_only() if compiles else []
    device = next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
    if compiles and (device is not None or torch.cuda.is_available()):  # a trainer may move the model later
        start_compile_workers(device)
    state.notes += linked
    state.attach()
    model.__dict__[ATTRIBUTE] = state
    return model


def _behave_as(model: nn.Module) -> list[Note]:
    """Hold the GPUs to the memory of the card that they are to behave as.

    Raises:
        UnknownGpu: there is no card of that name.
    """
    if not emulated():
        return []
    card = find_gpu(emulated())
    for device in {parameter.device for parameter in model.parameters() if parameter.is_cuda}:
        hold_to_memory(device, gauge_of(device).outside())
    return [note("emulated-card", card.title, VARIABLE)]


def _tell_of_settings(state: State, settings: Settings) -> None:
    """Warn of options of a second call that count for nothing."""
    plain = Settings(())
    names = ("memory", "precision", "executor", "offload_dir", "host_embedding")
    values = [(getattr(settings, name), getattr(plain, name), getattr(state.settings, name)) for name in names]
    if any(given not in (default, held) for given, default, held in values):
        log.warning("tunecompile: %s", note("optimized-already", type(state.model).__name__))


def _take_over(model: nn.Module) -> list[Note]:
    """Restore every model that parts of this one were optimized in."""
    steps = (getattr(slot_of(module), "step", None) for module in model.modules())
    states = {id(state): state for step in steps if isinstance(step, Step) and (state := step.state()) is not None}
    for state in states.values():
        state.detach()
        del state.model.__dict__[ATTRIBUTE]
    return [note("taken-over", type(state.model).__name__) for state in states.values()]


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
