"""Cache the fake results of ops, keyed by everything that a shape rule or a provider's graph depends on.

An op's reference is its shape rule. On fake tensors it takes as long as the model's own code, several times a
compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils import _pytree as pytree

from tunecompile._torch.fake_tensors import FakeTensor, fake_mode_of, free_unbacked_symbols


def signature(values: Any) -> Hashable | None:
    """Return a key of arguments. Under one fake mode, equal keys give equal results.

    Args:
        values: a pytree of fake tensors, symbolic sizes and constants.

    Returns:
        Of tensors dtype, device, sizes, strides and offset, of symbolic sizes their expressions, and the constants.
        None where the pytree contains anything else."""
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
    """Wrap a shape rule so that it runs once for each `signature`; later calls get empty tensors like its results."""

    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = fake_mode_of((args, kwargs))
        like = None if mode is None else signature((args, kwargs))
        if like is None:
            return rule(*args, **kwargs)
        known = vars(mode).setdefault("_tunecompile_results", {})  # symbolic sizes live as long as the mode does
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
    """Whether a result can be made again: None, or a tensor with its own memory and no new symbols in its sizes."""
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
