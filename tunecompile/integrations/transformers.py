"""transformers' slots: the checkpointing function of a layer, and the attention functions of a model's configs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

#: what models call the argument that is a cache: `cache` from transformers 5.24 on, which still takes the older names
_CACHES = ("cache", "past_key_values", "cache_params")


class PassThrough:
    """Stands in a layer's `_gradient_checkpointing_func`: the compiled region recomputes by its own plan. Copies of the
    model, which are not optimized, get the function itself.
    """

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, function: Callable, *args: Any, **_options: Any) -> Any:
        return function(*args)

    def __reduce__(self) -> tuple:
        return _identity, (self.function,)


def _identity(value: Any) -> Any:
    return value


def only_checkpoints(function: Any) -> bool:
    """Whether it is torch's checkpoint, with options."""
    while isinstance(function, functools.partial):
        function = function.func
    return function is checkpoint


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of transformers: of keys and values, or of states."""
    return isinstance(value, getattr(sys.modules.get("transformers"), "Cache", ()))


def gives_cache(given: dict[str, Any]) -> bool:
    """Whether the caller of a model gives it a cache of its own."""
    return any(given.get(name) is not None for name in _CACHES)


def _holds_tokens(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length())
    except (AttributeError, NotImplementedError, ValueError):  # of states alone, which count no tokens
        return False


def without_cache(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A layer's arguments without the cache that its model made, which is empty in a training step.

    It holds each layer's index, for which every layer would be recompiled up to Dynamo's limit; and a layer that is
    recomputed would fill it twice. One that holds tokens (of PEFT's prefix tuning) stays.
    """
    given = {name: None for name, value in kwargs.items() if is_cache(value) and not _holds_tokens(value)}
    if not given:
        return args, kwargs
    return args, {**kwargs, **given, **({"use_cache": False} if "use_cache" in kwargs else {})}
