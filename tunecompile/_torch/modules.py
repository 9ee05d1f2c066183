"""torch.nn.Module: where hooks are kept, and weights that others stand in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.stateless import _reparametrize_module as reparametrized

__all__ = ["HOOKS", "global_hooks", "hooked", "is_of", "linear", "reparametrized"]

linear = torch._C._nn.linear  #: what `torch.nn.functional.linear` is, until DeepSpeed's ZeRO-3 puts another function in its place (tunecompile/zero.py)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  #: where a module keeps them


def global_hooks() -> tuple[dict[int, Callable], ...]:
    """Those that calls of all modules call, by kind in the order of `HOOKS`. Nothing where there are none."""
    of = torch.nn.modules.module
    return (
        (
            of._global_forward_pre_hooks,
            of._global_forward_hooks,
            of._global_backward_pre_hooks,
            of._global_backward_hooks,
        )
        if of._has_any_global_hook()
        else ()
    )


def hooked(module: torch.nn.Module) -> bool:
    """Whether calling it, or its backward, calls hooks."""
    return any(getattr(part, name) for part in module.modules() for name in HOOKS) or bool(global_hooks())


def is_of(hook: Callable, packages: tuple[str, ...]) -> bool:
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(packages)


def slot_of(module: torch.nn.Module) -> Callable | None:
    """What calls of the module run in place of its own code: what `module.compile()` fills, and we do. None where nobody did."""
    return module._compiled_call_impl


def fill(module: torch.nn.Module, slot: Callable | None) -> None:
    """Have calls of the module run `slot`; None for its own code."""
    module._compiled_call_impl = slot


def empty(module: torch.nn.Module, slot: Callable | None) -> None:
    """Take our slot out, as if it had never been filled. (`module.compile()` called since then stays.)"""
    if module.__dict__.get("_compiled_call_impl") is slot:
        del module.__dict__["_compiled_call_impl"]


def fill_own(module: torch.nn.Module, slot: Callable | None) -> None:
    """The same of a copy that shares its class's or its original's slot (a replica of `nn.DataParallel`)."""
    module.__dict__["_compiled_call_impl"] = slot


def call_original(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call the module's own code with its hooks, whatever stands in its slot."""
    return module._call_impl(*args, **kwargs)
