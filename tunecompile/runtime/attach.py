"""What `optimize` and `restore` do to a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from tunecompile._torch.inductor import start_compile_workers
from tunecompile.compiler.backend import Executor
from tunecompile.compiler.compile_cache import link_read_only
from tunecompile.compiler.pass_manager import Pass
from tunecompile.planner.device_memory import Spec
from tunecompile.runtime.memory.host_embedding import HostEmbeddings
from tunecompile.runtime.model_state import ATTRIBUTE, Precision, State, Verify, state_of


def attach(
    model: nn.Module,
    passes: Sequence[Pass],
    *,
    executor: Executor = "inductor",
    precision: Precision | None = None,
    memory: Spec = None,
    host_bytes: int | None = None,
    offload_dir: Path | None = None,
    host_embedding: bool = False,
    verify: Verify | None = None,
) -> nn.Module:
    """`optimize`, by these passes. Does nothing to a model that is optimized, or where TUNECOMPILE=0.

    Args:
        model: in place.
        passes: in order.
        executor, precision, memory, offload_dir, host_embedding: as for `optimize`.
        host_bytes: of pinned host memory; None for half of what is available.
        verify: called once, before the first training step, with the model and the step's arguments by name.

    Returns:
        `model` itself.
    """
    if os.environ.get("TUNECOMPILE") == "0" or getattr(model, ATTRIBUTE, None) is not None:
        return model
    linked = link_read_only() if executor == "inductor" else []
    if executor == "inductor" and any(parameter.is_cuda for parameter in model.parameters()):
        start_compile_workers()
    state = State(
        model,
        tuple(passes),
        executor,
        precision,
        memory,
        host_bytes,
        offload_dir,
        HostEmbeddings() if host_embedding else None,
        verify=verify,
    )
    state.notes += linked
    state.attach()
    model.__dict__[ATTRIBUTE] = state
    return model


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
