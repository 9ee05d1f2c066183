"""torch.distributed: the ranks' store, FSDP2's parameter groups, local parts of DTensors, DDP's forward."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def around_now() -> DistributedDataParallel | None:
    """The wrapper inside whose forward this is, if any."""
    return DistributedDataParallel._get_active_ddp_module()


def meeting_store(prefix: str) -> Any:
    """Keys with this prefix in the store in which the ranks of the default group met, by a connection of our own: torch's may wait for another rank,
    with a lock on it. None where there is no such store (a group for tests)."""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        return torch.distributed.PrefixStore(prefix, _get_default_store().clone())
    except RuntimeError:
        return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a DTensor, of any other tensor all. (`to_local` makes a view, which cannot be traced, and plans are made while layers are.)"""
    return getattr(tensor, "_local_tensor", tensor)


def fsdp_groups(module: torch.nn.Module) -> tuple[Any, ...] | None:
    """What FSDP2 gathers and frees around this module's calls: groups of parameters. None for a module that `fully_shard` was not called for."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    state = states and states._get_module_fsdp_state(module)
    return None if state is None else _groups_of(state)


def fsdp_groups_behind(hook: Any) -> tuple[Any, ...] | None:
    """The same of the modules that FSDP2 registered a hook for, on what they return. None for anybody else's."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    state = getattr(hook, "__self__", None)
    return _groups_of(state) if states and isinstance(state, states.FSDPState) else None


def _groups_of(state: Any) -> tuple[Any, ...]:
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
    return tuple(group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None)


def several() -> bool:
    """Whether this process is one of several ranks."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
