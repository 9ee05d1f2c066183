"""torch.nn.Module: where hooks are kept, and weights that others stand in for."""

from __future__ import annotations

from typing import Callable

import torch
from torch.nn.utils.stateless import _reparametrize_module as reparametrized

__all__ = ["HOOKS", "global_hooks", "hooked", "is_of", "linear", "reparametrized"]

linear = torch._C._nn.linear  #: what `torch.nn.functional.linear` is, until DeepSpeed's ZeRO-3 puts another function in its place (tunecompile/zero.py)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  #: where a module keeps them

def global_hooks() -> tuple[dict[int, Callable], ...]:
    """Those that calls of all modules call, by kind in the order of `HOOKS`. Nothing where there are none."""
    of = torch.nn.modules.module
    return (of._global_forward_pre_hooks, of._global_forward_hooks, of._global_backward_pre_hooks, of._global_backward_hooks) if of._has_any_global_hook() else ()

def hooked(module: torch.nn.Module) -> bool:
    """Whether calling it, or its backward, calls hooks."""
    return any(getattr(part, name) for part in module.modules() for name in HOOKS) or bool(global_hooks())

def is_of(hook: Callable, packages: tuple[str, ...]) -> bool:
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(packages)
