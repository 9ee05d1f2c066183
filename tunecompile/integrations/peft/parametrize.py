"""Modules that parametrise another one, or replace its weights, at every call: PEFT's adapters over what is no linear.

Parameters of experts are such. torch gives a parametrised module a new class each time. Dynamo guards on classes, so it
would compile the functions that such a module calls anew in every layer and step, until it stops. Here PEFT's wrappers
are traced without a parametrisation (`tunecompile.integrations.peft.experts`).
`nn.MultiheadAttention` is another: its weights are deleted, and tensors with the adapter merged put in their place,
which no graph can do to its inputs. What cannot be traced runs uncompiled, between two compiled graphs of its layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence

from torch import nn

from tunecompile.integrations.packed_experts.stacks import class_of, packed_stacks
from tunecompile.integrations.peft import experts
from tunecompile.notes import Note, note


def trace_or_skip(layer: nn.Module) -> list[nn.Module]:
    """Have Dynamo trace the layer's parametrising modules, or skip them; `undo` undoes it.

    Returns:
        The modules: not those inside others, nor those whose forward was replaced on the module itself.
    """
    found = list(_parametrising(layer))
    for module in found:
        experts.take_off(module)
        if experts.refusal(module) is None:
            module.forward = experts.traced(module)
        elif not packed_stacks(module):
            # a partial: a copy of the module binds it to itself
            module.forward = functools.partial(experts.uncompiled, type(module).forward, module)
    return found


def undo(module: nn.Module) -> None:
    """Undo `trace_or_skip` for one module."""
    forward = module.__dict__.get("forward")
    skipped = isinstance(forward, functools.partial) and forward.func is experts.uncompiled
    if skipped or experts.is_traced(forward):
        del module.__dict__["forward"]


def report_lines(modules: Sequence[nn.Module]) -> list[Note]:
    """Notes about the modules that Dynamo skips, one for each reason."""
    skipped: dict[tuple[str, str], list[nn.Module]] = {}
    reasons: dict[str, Note] = {}
    for module in modules:
        if _merges(type(module)):
            skipped.setdefault(("merging-modules", ""), []).append(module)
        elif (reason := _refusal(module)) is not None:
            reasons[str(reason)] = reason
            code = "packed-stacks" if packed_stacks(module) else "parametrizing-modules"
            skipped.setdefault((code, str(reason)), []).append(module)
    return [
        note(code, ", ".join(sorted({class_of(m).__name__ for m in group})), reasons.get(why, ""), count=len(group))
        for (code, why), group in skipped.items()
    ]


def _parametrising(module: nn.Module) -> Iterator[nn.Module]:
    found = _parametrises(type(module)) or _merges(type(module)) or packed_stacks(module)
    if found and "forward" not in module.__dict__:
        yield module
        return
    for child in module.children():
        yield from _parametrising(child)


def _refusal(module: nn.Module) -> Note | None:
    """Why it is not traced in our way: not that we replaced its forward."""
    return None if experts.is_traced(vars(module).get("forward")) else experts.refusal(module)


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
