"""torch.distributed: the ranks' store, FSDP2's parameter groups, local parts of DTensors, DDP's forward."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tunecompile._torch.lookup import is_there, lookup
from tunecompile._torch.private_names import FSDP

_active_ddp = lookup("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module", lambda: None)
#: attributes of FSDP's, DeepSpeed's and tensor-parallel parameters
_SHARDED = ("device_mesh", "ds_id", "_fsdp_flattened")
_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"


def around_now() -> DistributedDataParallel | None:
    """The wrapper inside whose forward this is, if any."""
    return _active_ddp()


def meeting_store(prefix: str) -> Any:
    """The store in which the ranks of the default group met, by a connection of our own, below a prefix.

    torch's own connection may wait for another rank, with a lock on it. None where there is no such store (a group for
    tests).
    """
    find = lookup("torch.distributed.distributed_c10d._get_default_store")
    if find is None:
        return None
    try:
        return torch.distributed.PrefixStore(prefix, find().clone())
    except RuntimeError:
        return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds; any other tensor whole.

    (`to_local` makes a view, which cannot be traced, and plans are made while layers are.)
    """
    return getattr(tensor, "_local_tensor", tensor)


def fsdp_groups(module: torch.nn.Module) -> tuple[Any, ...] | None:
    """The groups of parameters that FSDP2 gathers and frees around this module's calls.

    None for a module that `fully_shard` was not called for.
    """
    states = _fsdp_states()
    state = None if states is None else states._get_module_fsdp_state(module)
    return None if state is None else _groups_of(state)


def fsdp_forget_call(module: torch.nn.Module) -> None:
    """After a forward of a module that FSDP2 gathers, which an error ended: the next one is its first again.

    A module that is still in its forward gets no second node behind which its gradients are sent (torch 2.13).
    """
    states = _fsdp_states()
    state = None if states is None else states._get_module_fsdp_state(module)
    for each in () if state is None else (state, *_groups_of(state)):
        if hasattr(each, "_training_state"):
            each._training_state = type(each._training_state).IDLE


def fsdp_groups_behind(hook: Any) -> tuple[Any, ...] | None:
    """The groups of the modules whose outputs have this hook of FSDP2. None for a hook of another origin."""
    states = _fsdp_states()
    state = getattr(hook, "__self__", None)
    return _groups_of(state) if states is not None and isinstance(state, states.FSDPState) else None


def _fsdp_states() -> Any:
    """FSDP2's module of states. None where it is not imported, or lacks a name that this package uses."""
    return sys.modules.get(_STATES) if _STATES in sys.modules and _fsdp_is_known() else None


@functools.cache
def _fsdp_is_known() -> bool:
    return all(is_there(row) for row in FSDP if row.used)


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


def sharded(parameter: torch.Tensor) -> bool:
    """Whether several processes share a parameter."""
    return any(hasattr(parameter, name) for name in _SHARDED)
