"""torch.nn.Module: its slot for compiled code, where hooks are kept, and weights that others replace for a while."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import noop_context_fn

from tunecompile._torch.lookup import exist, lookup, need

#: the function `torch.nn.functional.linear`, until DeepSpeed's ZeRO-3 puts another one in its place
#: (tunecompile/integrations/deepspeed.py)
linear = lookup("torch._C._nn.linear", torch.nn.functional.linear)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  #: where a module keeps them

_MODULE = torch.nn.modules.module
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
_GLOBAL_HOOKS += ("_global_backward_pre_hooks", "_global_backward_hooks")
_KNOWS_GLOBAL_HOOKS = exist("_has_any_global_hook", *_GLOBAL_HOOKS, under="torch.nn.modules.module")


def reparametrized(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> contextlib.AbstractContextManager:
    """Inside, the module's parameters of these names are these tensors.

    Raises:
        ImportError: torch has no such function.
    """
    return need("torch.nn.utils.stateless._reparametrize_module")(module, values)


def checkpoints(module: torch.nn.Module) -> bool:
    """Whether a module is torch's `checkpoint_wrapper` around another, which calls it by its `checkpoint_fn`.

    False for one that says by a `context_fn` which values are saved.
    """
    kind = getattr(sys.modules.get(_WRAPPERS), "CheckpointWrapper", None)
    if kind is None or type(module) is not kind:
        return False
    function = vars(module).get("checkpoint_fn")
    given = function.keywords if isinstance(function, functools.partial) else {}
    return given.get("context_fn", noop_context_fn) is noop_context_fn


def global_hooks() -> tuple[dict[int, Callable], ...]:
    """Hooks that calls of all modules call, by kind in the order of `HOOKS`. Empty where there are none."""
    if not _KNOWS_GLOBAL_HOOKS or not _MODULE._has_any_global_hook():
        return ()
    return tuple(getattr(_MODULE, name) for name in _GLOBAL_HOOKS)


def hooked(module: torch.nn.Module) -> bool:
    """Whether calling it, or its backward, calls hooks."""
    return any(getattr(part, name) for part in module.modules() for name in HOOKS) or bool(global_hooks())


def is_of(hook: Callable, packages: tuple[str, ...]) -> bool:
    """Whether a hook was written in a module whose name begins with one of these."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(packages)


def slot_of(module: torch.nn.Module) -> Callable | None:
    """The code that calls of the module run in place of its own: `module.compile()` fills this slot, and so do we.

    None where the slot is empty.
    """
    return getattr(module, "_compiled_call_impl", None)


def fill(module: torch.nn.Module, slot: Callable | None) -> None:
    """Have calls of the module run `slot`; None for its own code."""
    module._compiled_call_impl = slot


def empty(module: torch.nn.Module, slot: Callable | None) -> None:
    """Take our slot out, as if it had never been filled. (`module.compile()` called since then stays.)"""
    if module.__dict__.get("_compiled_call_impl") is slot:
        del module.__dict__["_compiled_call_impl"]


def fill_own(module: torch.nn.Module, slot: Callable | None) -> None:
    """`fill`, for a copy that shares its class's or its original's slot (a replica of `nn.DataParallel`)."""
    module.__dict__["_compiled_call_impl"] = slot


def call_original(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call the module's own code with its hooks, whatever its slot holds."""
    return module._call_impl(*args, **kwargs)
