"""PEFT's adapters over parameters, traced: their values are handed to the module's forward, without a parametrisation.

PEFT's `ParamWrapper` puts a parametrisation on the module that it wraps, around every call, and bitsandbytes one on a
module with 4-bit stacks, for good. While Dynamo traces, the module's forward runs on a stand-in instead, which has
adapted or dequantised values where the module has parameters. Nothing is assigned to PEFT or bitsandbytes.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.known_bugs import ADAPTED_4_BIT_STACKS
from tunecompile._torch.modules import HOOKS, is_of
from tunecompile.integrations.packed_experts.stacks import (
    HOOK_MODULE,
    class_of,
    is_plain,
    is_shard,
    packed_stacks,
    unpacked,
)
from tunecompile.notes import Note, note
from tunecompile.ops import adapted_stack

_IMPLEMENTATION = "_experts_implementation"  #: of transformers' configs: how experts are multiplied
WRAPPERS = "peft.tuners.lora.layer"  #: where PEFT has them, and the parametrisations that they make
_OF_ANY_MODULE = frozenset(dir(nn.Module))


class StandIn:
    """What a module's forward sees as the module: some parameters have other values; all else is the module's."""

    def __init__(self, module: nn.Module, kind: type, values: dict[str, Tensor]):
        self._module = module
        self._kind = kind
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        method = getattr(self._kind, name, None)
        if isinstance(method, types.FunctionType) and name not in _OF_ANY_MODULE:
            return functools.partial(method, self)
        return getattr(self._module, name)


@torch.compiler.disable(reason="weights are parametrised or replaced at every call")
def uncompiled(forward: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call `forward` where Dynamo does not look."""
    return forward(module, *args, **kwargs)


def traced(outermost: nn.Module) -> types.MethodType:
    """The forward of a module with 4-bit stacks, or of the outermost wrapper of a module, that Dynamo can trace.

    A bound method, since Dynamo takes it for another layer's, too; a copy of the wrapper has its own.
    """
    inner = _innermost(outermost)
    own = tuple(sum(is_of(hook, (HOOK_MODULE,)) for hook in getattr(inner, name).values()) for name in HOOKS)
    return types.MethodType(_forward_with(class_of(inner), packed_stacks(inner), own), outermost)


def is_traced(forward: Any) -> bool:
    """Whether `traced` made it."""
    return getattr(forward, "__func__", None) in _TRACED


_TRACED: set[Callable] = set()


@functools.cache
def _forward_with(kind: type, packed: tuple[str, ...], own: tuple[int, ...]) -> Callable:
    """Of the name `forward`, so that what is pickled finds the class's.

    Args:
        kind: whose forward it calls. (Dynamo would guard on a parametrised module's own class.)
        packed: the names of 4-bit stacks.
        own: how many hooks of each kind are bitsandbytes', for a cache that is not read here.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a wrapper's module with adapted values."""
        if not packed and not torch.compiler.is_compiling():
            return type(self).forward(self, *args, **kwargs)
        inner, adapters, seen = _look_through(self, packed, own)
        if adapters is None or (seen and not packed) or _is_sharded(inner, adapters):
            return uncompiled(type(self).forward, self, *args, **kwargs)
        values = {name: unpacked(inner, name) for name in packed}
        for name, (wrapper, active) in adapters.items():
            values[name] = _adapted(wrapper, values.get(name), active)
        if not values:
            return inner(*args, **kwargs)
        stand_in = StandIn(inner, kind, values)
        if seen:
            return uncompiled(_hooked, inner, functools.partial(kind.forward, stand_in), *args, **kwargs)
        return kind.forward(stand_in, *args, **kwargs)

    _TRACED.add(forward)
    return forward


def _look_through(
    outermost: Any, packed: tuple[str, ...], own: tuple[int, ...]
) -> tuple[Any, dict[str, tuple[Any, list[str]]] | None, bool]:
    """(The module that is wrapped, (wrapper, active adapters) by parameter, whether hooks see its calls).

    Adapters are None where PEFT takes them out of the weights now. What PEFT merged into a 4-bit stack it has added to
    a dequantised copy, which is gone: such adapters go on being computed.
    """
    inner, adapters, seen = outermost, {}, False
    while hasattr(inner, "parameter_name"):
        merged = inner.merged and inner.parameter_name not in packed
        if inner.disable_adapters:
            if merged:
                return inner, None, seen
        elif not merged:
            names = [name for name in inner.active_adapters if name in inner.lora_A]
            if names:
                adapters[inner.parameter_name] = inner, names
        inner = inner.base_layer
        seen = seen or _is_hooked(inner, own if _is_plain(inner) else (0, 0, 0, 0))
    return inner, adapters, seen


def _is_sharded(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether adapted parameters are shards in a call, too: those of tensor parallelism stay so."""
    return any(is_shard(module._parameters.get(name)) for name in names)


def _hooked(module: nn.Module, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a module, with its hooks; `run` is its forward meanwhile."""
    module.forward = run
    try:
        return module(*args, **kwargs)
    finally:
        del module.forward


def take_off(outermost: nn.Module) -> None:
    """Take adapters off a module's stacks that PEFT has left there (known_bugs.ADAPTED_4_BIT_STACKS)."""
    if not ADAPTED_4_BIT_STACKS.present or _is_plain(outermost):
        return
    for chain in getattr(_innermost(outermost), "parametrizations", {}).values():
        for place in reversed(range(1, len(chain))):
            if type(chain[place]).__module__ == WRAPPERS:
                del chain[place]


def _is_plain(module: nn.Module) -> bool:
    """Whether it is no wrapper of PEFT's."""
    return not hasattr(module, "parameter_name")


def _innermost(module: nn.Module) -> nn.Module:
    while hasattr(module, "parameter_name"):
        module = module.base_layer
    return module


def _adapted(wrapper: Any, weight: Tensor | None, names: list[str]) -> Tensor:
    """weight: None where the module's own parameter is adapted."""
    weight = wrapper.get_param() if weight is None else weight
    if weight.dim() == 2:
        for name in names:
            weight = weight + wrapper.get_delta_weight(name)
        return weight
    a, b = ([matrices[name].weight for name in names] for matrices in (wrapper.lora_A, wrapper.lora_B))
    scales = [float(wrapper.scaling[name]) for name in names]
    return adapted_stack(weight, a, b, scales, not wrapper._did_swap_in_out_features)


def _is_hooked(module: nn.Module, own: tuple[int, ...]) -> bool:
    """Whether hooks of others would notice that the module itself is not called."""
    return any(len(getattr(module, name)) != count for name, count in zip(HOOKS, own))


def refusal(module: nn.Module) -> Note | None:
    """Why a parametrising module cannot be traced, or None.

    Args:
        module: the outermost of those around one module, or a module with 4-bit stacks.
    """
    if packed_stacks(module):
        return _refuse_code(module)
    wrapper = getattr(sys.modules.get(WRAPPERS), "ParamWrapper", None)
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
    for name in set(names) - set(packed_stacks(inner)):
        parameter = inner._parameters.get(name)
        if parameter is None:
            return note("adapted-value-not-plain", name)
        stacked = parameter.dim() == 3 and parameter.shape[0] > 1
        if not is_plain(parameter) or not (stacked or parameter.dim() == 2):
            return note("adapted-value-not-plain", name)
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            return note("adapted-value-not-plain", name)
    return None


def _refuse_code(inner: nn.Module) -> Note | None:
    """Whether the module's code would notice that it does not run on the module."""
    kind, packed = class_of(inner), packed_stacks(inner)
    if "forward" in vars(inner) or len(getattr(inner, "parametrizations", ())) != len(packed):
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
        for code in _with_inner(inspect.unwrap(class_of(inner).forward).__code__)
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
