"""Cache the fake results of ops, keyed by everything that a shape rule or a provider's graph depends on.

An op's reference is its shape rule. On fake tensors it takes as long as the model's own code, several times a
compilation. Where all sizes are numbers, results of this package's own ops hold for the whole process: layers of a
kind, forward and backward, and later models share them. A symbol has a meaning in its fake mode alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils import _pytree as pytree

from tunecompile._torch.fake_tensors import FakeTensor, fake_mode_of, free_unbacked_symbols
from tunecompile.ir.pretend_gpu import pretending


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


class ProcessCache(dict):
    """Entries that hold in every fake mode. When it is full it starts again: shapes of a training run are few."""

    instances: ClassVar[list[ProcessCache]] = []

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.instances.append(self)

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, value)


def process_key(fn: Callable, like: Hashable | None) -> Hashable | None:
    """Return a key for what `fn` gives for arguments of the signature `like`, in any fake mode of this process.

    Returns:
        None where there is none: a size is a symbol, or `fn` is not of this package. (Users may define a function of
        theirs again, or what it calls.)
    """
    if like is None or _has_symbols(like) or not (fn.__module__ or "").startswith("tunecompile."):
        return None
    return fn, like, pretending(), torch.get_default_dtype()


def _has_symbols(like: Any) -> bool:
    return any(
        part[0] == "symbol" or (part[0] == "tensor" and not all(type(size) is int for size in part[-1]))
        for part in like[1]
    )


_results = ProcessCache(4096)  #: what shape rules gave, see `remembered`


def remembered(rule: Callable) -> Callable:
    """Wrap a shape rule so that it runs once for each `signature`; later calls get empty tensors like its results."""

    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = fake_mode_of((args, kwargs))
        like = None if mode is None else signature((args, kwargs))
        if like is None:
            return rule(*args, **kwargs)
        anywhere = process_key(rule, like)
        key: Any = anywhere or (rule, like)
        # symbolic sizes live as long as the mode does
        known = _results if anywhere else vars(mode).setdefault("_tunecompile_results", {})
        given = pytree.tree_leaves((args, kwargs))
        if (found := known.get(key)) is not None:
            makers, spec = found
            return pytree.tree_unflatten([make(given) for make in makers], spec)
        result = rule(*args, **kwargs)
        flat, spec = pytree.tree_flatten(result)
        makers = [_maker(value, given) if _is_plain(value) else None for value in flat]
        if None not in makers:
            known[key] = makers, spec
        return result

    return run


def first_of(shapes: Callable | None, reference: Callable) -> Callable:
    """Return the shape rule `shapes`, behind which `reference` takes its place where it gives None."""
    if shapes is None:
        return reference

    @functools.wraps(shapes)
    def rule(*args: Any, **kwargs: Any) -> Any:
        result = shapes(*args, **kwargs)
        return reference(*args, **kwargs) if result is None else result

    return rule


def are_contiguous(*tensors: Tensor) -> bool:
    """Return whether what is computed of these element by element is contiguous, too."""
    return all(x.is_contiguous() for x in tensors)


def contiguous_like(*tensors: Tensor) -> list[Tensor]:
    """Return a new contiguous tensor for each one, of its shape, dtype and device: gradients, to shape rules."""
    return [x.new_empty(x.shape) for x in tensors]


def _is_plain(value: Any) -> bool:
    """Whether a result can be made again: None, or a tensor with its own memory and no new symbols in its sizes."""
    return value is None or (
        isinstance(value, FakeTensor)
        and value.layout is torch.strided
        and type(value.storage_offset()) is int
        and value.storage_offset() == 0
        and not free_unbacked_symbols(value)
    )


def _maker(value: Tensor | None, given: Sequence[Any]) -> Callable[[Sequence[Any]], Tensor | None] | None:
    """A function from a call's arguments to a result like `value`; None where there is none.

    Sizes that are symbols are those of an argument: a trace knows where these come from. Of an earlier trace's, which
    may have become a gradient's since, it would think that the forward reads that gradient.
    """
    if value is None:
        return lambda given: None
    options = {"dtype": value.dtype, "device": value.device}
    if not any(isinstance(size, SymInt) for size in (*value.shape, *value.stride())):
        made = functools.partial(torch.empty_strided, value.shape, value.stride(), **options)
        return lambda given: made()
    places = {
        size.node.expr: (at, dim)
        for at, each in enumerate(given)
        if isinstance(each, Tensor)
        for dim, size in enumerate(each.shape)
        if isinstance(size, SymInt)
    }
    sizes: list[Any] = [places.get(size.node.expr) if isinstance(size, SymInt) else size for size in value.shape]
    if None in sizes or not value.is_contiguous():
        return None

    def make(given: Sequence[Any]) -> Tensor:
        return torch.empty([each if type(each) is int else given[each[0]].shape[each[1]] for each in sizes], **options)

    return make
