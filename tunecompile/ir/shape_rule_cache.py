"""What the shape rule of an op, or a provider's graph, depends on: so that what is known of one call serves for its like.

An op's reference is its shape rule. Run on fake tensors it takes as long as the model's own code would, several times a compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils import _pytree as pytree

from tunecompile._torch.fake_tensors import FakeTensor, fake_mode_of, free_unbacked_symbols


def signature(values: Any) -> Hashable | None:
    """Of arguments: of tensors all but the numbers in them. Equal ones have equal results, under one fake mode. Symbolic sizes are told apart
    by their expressions. None where something in them is neither."""
    flat, spec = pytree.tree_flatten(values)
    parts = tuple(map(_of, flat))
    return None if None in parts else (spec, parts)


def _of(value: Any) -> Hashable | None:
    if isinstance(value, FakeTensor):
        sizes = *value.shape, *value.stride(), value.storage_offset()
        return "tensor", value.dtype, value.device, value.dim(), tuple(map(_size, sizes))
    if isinstance(value, (SymInt, SymFloat, SymBool)):
        return "symbol", _size(value)
    if value is None or isinstance(
        value, (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    ):
        return type(value), value
    return None


def _size(size: Any) -> Hashable:
    return size.node.expr if isinstance(size, (SymInt, SymFloat, SymBool)) else size


def remembered(rule: Callable) -> Callable:
    """The same shape rule, run once for arguments that are alike: afterwards its results are made at once."""

    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = fake_mode_of((args, kwargs))
        like = None if mode is None else signature((args, kwargs))
        if like is None:
            return rule(*args, **kwargs)
        known = vars(mode).setdefault(
            "_tunecompile_results", {}
        )  # sizes that are symbolic live as long as the mode does
        if (rule, like) in known:
            makers, spec = known[rule, like]
            return pytree.tree_unflatten([make() for make in makers], spec)
        result = rule(*args, **kwargs)
        flat, spec = pytree.tree_flatten(result)
        if all(map(_is_plain, flat)):
            known[rule, like] = [_maker(value) for value in flat], spec
        return result

    return run


def _is_plain(value: Any) -> bool:
    """A tensor of its own memory, with sizes that were there before: a second call with symbols of its own would have others."""
    return value is None or (
        isinstance(value, FakeTensor)
        and value.layout is torch.strided
        and type(value.storage_offset()) is int
        and value.storage_offset() == 0
        and not free_unbacked_symbols(value)
    )


def _maker(value: Tensor | None) -> Callable[[], Tensor | None]:
    if value is None:
        return lambda: None
    return functools.partial(torch.empty_strided, value.shape, value.stride(), dtype=value.dtype, device=value.device)
