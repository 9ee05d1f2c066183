"""Modules that put a parametrisation on another one at every call: PEFT's adapters over parameters that are no linears', such as those of experts.

torch gives a parametrised module a new class each time. Dynamo guards on classes, so it would compile what such a module calls anew in every layer and
step, until it gives up. Here they run as they are, between two compiled pieces of their layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tunecompile.notes import Note, note


@torch.compiler.disable(reason="a parametrisation is put on at every call")
def as_it_is(forward: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(module, *args, **kwargs)


def keep_from_dynamo(layer: nn.Module) -> list[nn.Module]:
    """Lets those of the layer's modules run as they are, which `give_back` undoes. Returns them; not those inside of others, nor those whose forward somebody replaced."""
    found = list(_parametrising(layer))
    for module in found:
        module.forward = functools.partial(
            as_it_is, type(module).forward, module
        )  # a partial: a copy of the module binds it to itself
    return found


def give_back(module: nn.Module) -> None:
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.func is as_it_is:
        del module.__dict__["forward"]


def said(modules: Sequence[nn.Module]) -> list[Note]:
    """For the report."""
    if not modules:
        return []
    kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
    return [note("parametrizing-modules", kinds, count=len(modules))]


def _parametrising(module: nn.Module) -> Iterator[nn.Module]:
    if _parametrises(type(module)) and "forward" not in module.__dict__:
        yield module
        return
    for child in module.children():
        yield from _parametrising(child)


@functools.cache
def _parametrises(kind: type) -> bool:
    """Whether any method of the class asks torch for it."""
    methods = (
        inspect.unwrap(f)
        for owner in kind.__mro__
        if owner is not nn.Module
        for f in vars(owner).values()
        if inspect.isfunction(f)
    )
    return any("register_parametrization" in f.__code__.co_names for f in methods)
