"""Requests for the gradient at deferred logits: a hook, `retain_grad`, `torch.autograd.grad`, `backward(inputs=...)`.

They are made then, and all that is computed of them from now on passes them. What was computed before, without making
them, does not: its backward pass says so (`pass_by`), for a hook that is never called looks like a gradient that is
zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tunecompile.errors import NoGradient
from tunecompile.integrations import deepspeed
from tunecompile.integrations.fsdp import is_its_own, waits_for_backward
from tunecompile.integrations.module_hooks import of_fabric
from tunecompile.runtime.loss_head.deferred import RECORD, WITHOUT, LazyTensor, handles, natively, passed_by
from tunecompile.runtime.loss_head.logits import Logits

#: `torch.autograd.graph.register_multi_grad_hook` registers functions at each tensor whose names begin with it
_SEVERAL = "register_multi_grad_hook"


@handles(RECORD, Tensor.register_hook)
def hook(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Register a hook at the real logits. Hooks of FSDP, DeepSpeed and Fabric read no gradient, and need none."""
    lazy, given = args[0], args[1] if len(args) == 2 else None
    if given is not None and not lazy.adopted and (waits := _may_wait(lazy.recipe, given)) is not None:
        return _later(lazy.recipe, given) if waits else NotImplemented
    if (
        lazy.recipe.real is None and not lazy.adopted and getattr(given, "__qualname__", "").startswith(_SEVERAL)
    ):  # it has read `grad_fn`, and waits for that node
        raise NoGradient(asked=_SEVERAL, reason="they are not made yet")
    return _ask_at(lazy, func, args, kwargs)


def _may_wait(recipe: Any, given: Callable) -> bool | None:
    """Whether logits may stay deferred under an engine's hook on all outputs of a model; None for any other hook.

    FSDP2's and DeepSpeed's see the backward pass begin, and DeepSpeed's also divides gradients that do not begin in
    `engine.backward`: at a loss that is an output, too, they do so once. Fabric's see whether the user calls
    `fabric.backward`: where this is checked, and no loss is an output, the hook is all that could tell.
    """
    deferrable = isinstance(recipe, Logits)
    scored = deferrable and recipe.head.has_loss_of(recipe.hidden)
    if (checks := of_fabric(given)) is not None:
        return deferrable and (scored or not checks)
    if is_its_own(given):
        return scored and recipe.deferred and waits_for_backward(given)
    return scored and recipe.deferred if deepspeed.is_its_own(given) else None


def _later(recipe: Logits, given: Callable) -> RemovableHandle:
    """Register a hook if the logits are computed after all, and the hook is still there."""
    if recipe.real is not None:
        return recipe.real.register_hook(given)
    handle = RemovableHandle(recipe.hooks)
    recipe.hooks[handle.id] = given
    return handle


@handles(RECORD, Tensor.retain_grad)
def retain_grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Retain the gradient at the real logits, where `grad` below finds it."""
    return _ask_at(args[0], func, args, kwargs)


def _ask_at(lazy: LazyTensor, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Note the request; NotImplemented sends the call to the real logits."""
    if lazy.adopted:  # what is made of it has it behind itself
        return natively(func, *args, **kwargs)
    lazy.recipe.line[-1].asked = func.__name__
    return NotImplemented


@handles(RECORD, torch.autograd.grad, torch.autograd.backward)
def differentiate(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Refuse gradients that do not arrive. The graph is searched, since no node that would report it may be called."""
    inputs = args[1] if func is torch.autograd.grad else kwargs.get("inputs")
    asked = [lazy for lazy in inputs or () if isinstance(lazy, LazyTensor)]
    if asked and all(lazy.adopted for lazy in asked):
        return natively(func, *args, **kwargs)
    if not passed_by(args[0]).isdisjoint(lazy.recipe.line[-1] for lazy in asked):
        raise NoGradient(asked=f"torch.autograd.{func.__name__}", reason=WITHOUT)
    return NotImplemented


@handles(RECORD, Tensor.grad.__get__)
def grad(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """Return the gradient without computing logits.

    Where `backward` has deferred tensors as inputs, older versions of torch call no handler, and accumulate gradients
    at the deferred tensors, not at the real ones."""
    lazy = args[0]
    kept = natively(Tensor.retains_grad.__get__, lazy)
    found = natively(func, lazy) if kept or lazy.recipe.real is None else func(lazy.recipe.real)
    if kept and found is None and not lazy.adopted:
        raise NoGradient(
            asked="backward(inputs=...)",
            reason="this version of torch knows them among inputs of torch.autograd.grad only",
        )
    return found


@handles(RECORD, Tensor.grad_fn.__get__)
def grad_fn(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Return the node at which the gradient of computed logits arrives; DDP reads it of deferred ones, too."""
    lazy = args[0]
    return natively(func, lazy) if lazy.recipe.real is None or lazy.adopted else func(lazy.recipe.real)
