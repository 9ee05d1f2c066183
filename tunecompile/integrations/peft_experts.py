"""PEFT's adapters over parameters, traced: their values are handed to the module's forward, without a parametrisation.

PEFT's `ParamWrapper` puts a parametrisation on the module that it wraps, around every call. While Dynamo traces, the
module's forward runs on a stand-in instead, which has adapted values where the module has parameters. Nothing is
assigned to the module, or to PEFT.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.modules import HOOKS
from tunecompile.notes import Note, note
from tunecompile.ops.experts import adapted_stack

__all__ = ["StandIn", "forward", "refusal", "uncompiled"]

_IMPLEMENTATION = "_experts_implementation"  #: of transformers' configs: how experts are multiplied
_OF_ANY_MODULE = frozenset(dir(nn.Module))


class StandIn:
    """What a module's forward sees as the module: some parameters have other values; all else is the module's."""

    def __init__(self, module: nn.Module, values: dict[str, Tensor]):
        self._module = module
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        method = getattr(type(self._module), name, None)
        if isinstance(method, types.FunctionType) and name not in _OF_ANY_MODULE:
            return functools.partial(method, self)
        return getattr(self._module, name)


@torch.compiler.disable(reason="weights are parametrised or replaced at every call")
def uncompiled(forward: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call `forward` where Dynamo does not look."""
    return forward(module, *args, **kwargs)


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a wrapper's module with adapted values. It is bound to the outermost wrapper of a module, as its `forward`.

    A bound method, since Dynamo takes it for another layer's, too; a copy of the wrapper has its own. (Of that name, so
    that what is pickled finds the class's.)
    """
    own = type(self).forward
    if not torch.compiler.is_compiling():
        return own(self, *args, **kwargs)
    inner, values = self, {}
    while hasattr(inner, "parameter_name"):
        if inner.disable_adapters:
            if inner.merged:  # PEFT takes them out of the weights now
                return uncompiled(own, self, *args, **kwargs)
        elif not inner.merged:
            names = [name for name in inner.active_adapters if name in inner.lora_A]
            if names:
                values[inner.parameter_name] = _adapted(inner, names)
        inner = inner.base_layer
        if _is_hooked(inner):
            return uncompiled(own, self, *args, **kwargs)
    if not values:
        return inner(*args, **kwargs)
    return type(inner).forward(StandIn(inner, values), *args, **kwargs)


def _adapted(wrapper: Any, names: list[str]) -> Tensor:
    weight = wrapper.get_param()
    if weight.dim() == 2:
        for name in names:
            weight = weight + wrapper.get_delta_weight(name)
        return weight
    a, b = ([matrices[name].weight for name in names] for matrices in (wrapper.lora_A, wrapper.lora_B))
    scales = [float(wrapper.scaling[name]) for name in names]
    return adapted_stack(weight, a, b, scales, not wrapper._did_swap_in_out_features)


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody would notice that the module itself is not called."""
    return any(len(getattr(module, name)) for name in HOOKS)


def refusal(module: nn.Module) -> Note | None:
    """Why a parametrising module cannot be traced, or None.

    Args:
        module: the outermost of those around one module.
    """
    wrapper = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    inner, names = module, []
    while wrapper is not None and type(inner) is wrapper:
        if not hasattr(inner, "_did_swap_in_out_features") or getattr(inner, "lora_variant", None):
            return note("adapter-over-parameters-unknown")
        names.append(inner.parameter_name)
        inner = inner.base_layer
    if not names or len(set(names)) < len(names):
        return note("adapter-over-parameters-unknown")
    return _refuse_values(inner, names) or _refuse_code(inner)


def _refuse_values(inner: nn.Module, names: list[str]) -> Note | None:
    for name in names:
        parameter = inner._parameters.get(name)
        if parameter is None:
            return note("adapted-value-not-plain", name)
        stacked = parameter.dim() == 3 and parameter.shape[0] > 1
        if type(parameter) is not nn.Parameter or not (stacked or parameter.dim() == 2):
            return note("adapted-value-not-plain", name)
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            return note("adapted-value-not-plain", name)
    return None


def _refuse_code(inner: nn.Module) -> Note | None:
    """Whether the module's code would notice that it does not run on the module."""
    kind = type(inner)
    if "forward" in vars(inner) or hasattr(inner, "parametrizations"):
        return note("forward-replaced", kind.__name__)
    for name, member in _members(kind).items():
        if isinstance(member, (property, staticmethod, classmethod)):
            return note("reads-itself", kind.__name__)
        if not inspect.isfunction(member):
            continue
        codes = list(_with_inner(member.__code__))
        if name in vars(inner) or any("__class__" in code.co_freevars or _assigns(code) for code in codes):
            return note("reads-itself", kind.__name__)
    return note("loops-over-experts", kind.__name__) if _loops(inner) else None


def _loops(inner: nn.Module) -> bool:
    """Whether its forward is a loop, which goes over the experts that have tokens: another number in every step.

    Where transformers' config chooses another implementation, its own forward does not run.
    """
    if getattr(getattr(inner, "config", None), _IMPLEMENTATION, "eager") not in ("eager", None):
        return False
    return any(
        step.opname == "FOR_ITER"
        for code in _with_inner(inspect.unwrap(type(inner).forward).__code__)
        for step in dis.get_instructions(code)
    )


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of comprehensions and functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


@functools.cache
def _members(kind: type) -> dict[str, Any]:
    """What its classes define, below nn.Module; without `__init__` and its like. Decorated functions are unwrapped."""
    found: dict[str, Any] = {}
    for owner in reversed(kind.__mro__[: kind.__mro__.index(nn.Module)]):
        found |= {name: inspect.unwrap(f) if inspect.isfunction(f) else f for name, f in _own(owner)}
    return found


def _own(owner: type) -> Iterator[tuple[str, Any]]:
    return ((name, member) for name, member in vars(owner).items() if not name.startswith("__"))


def _assigns(code: types.CodeType) -> bool:
    """Whether a method sets an attribute, perhaps of the module."""
    return any(step.opname == "STORE_ATTR" for step in dis.get_instructions(code))
