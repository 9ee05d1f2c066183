"""Modules that parametrise another one, or replace its weights, at every call: PEFT's adapters over what is no linear.

Parameters of experts are such. torch gives a parametrised module a new class each time. Dynamo guards on classes, so it
would compile the functions that such a module calls anew in every layer and step, until it stops.
`nn.MultiheadAttention` is another: its weights are deleted, and tensors with the adapter merged put in their place,
which no graph can do to its inputs. Here these modules run uncompiled, between two compiled graphs of their layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tunecompile.notes import Note, note


@torch.compiler.disable(reason="weights are parametrised or replaced at every call")
def _uncompiled(forward: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(module, *args, **kwargs)


def skip_in_dynamo(layer: nn.Module) -> list[nn.Module]:
    """Have Dynamo skip the layer's parametrising modules; `undo_skip` undoes it.

    Returns:
        The modules: not those inside others, nor those whose forward was replaced on the module itself.
    """
    found = list(_parametrising(layer))
    for module in found:
        # a partial: a copy of the module binds it to itself
        module.forward = functools.partial(_uncompiled, type(module).forward, module)
    return found


def undo_skip(module: nn.Module) -> None:
    """Undo `skip_in_dynamo` for one module."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.func is _uncompiled:
        del module.__dict__["forward"]


def report_lines(modules: Sequence[nn.Module]) -> list[Note]:
    """A note about the modules that Dynamo skips."""
    told = []
    for code, which in (("merging-modules", True), ("parametrizing-modules", False)):
        found = [type(module) for module in modules if _merges(type(module)) is which]
        if found:
            told.append(note(code, ", ".join(sorted({kind.__name__ for kind in found})), count=len(found)))
    return told


def _parametrising(module: nn.Module) -> Iterator[nn.Module]:
    if (_parametrises(type(module)) or _merges(type(module))) and "forward" not in module.__dict__:
        yield module
        return
    for child in module.children():
        yield from _parametrising(child)


@functools.cache
def _parametrises(kind: type) -> bool:
    """Whether any method of the class calls torch's `register_parametrization`."""
    methods = (
        inspect.unwrap(f)
        for owner in kind.__mro__
        if owner is not nn.Module
        for f in vars(owner).values()
        if inspect.isfunction(f)
    )
    return any("register_parametrization" in f.__code__.co_names for f in methods)


@functools.cache
def _merges(kind: type) -> bool:
    """Whether the class's forward merges an adapter into the weights and takes it out again. (That of linears does
    neither in training.)
    """
    forward = inspect.unwrap(kind.forward)
    return inspect.isfunction(forward) and {"merge", "unmerge"} <= set(forward.__code__.co_names)
