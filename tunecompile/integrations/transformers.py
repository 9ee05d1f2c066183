"""transformers' slots: the checkpointing function of a layer, and the attention functions of a model's configs."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: what models call the argument that is a cache: `cache` from transformers 5.24 on, which still takes the older names
CACHES = ("cache", "past_key_values", "cache_params")


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
    return any(given.get(name) is not None for name in CACHES)


def holds_tokens(cache: Any) -> bool:
    """Whether a cache is known to hold keys and values."""
    try:
        return bool(cache.get_seq_length())
    except (AttributeError, NotImplementedError, ValueError):  # of states alone, which count no tokens
        return False


def without_cache(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A layer's arguments without the cache that its model made, which is empty in a training step.

    It holds each layer's index, for which every layer would be recompiled up to Dynamo's limit; and a layer that is
    recomputed would fill it twice. One that holds tokens (of PEFT's prefix tuning) stays.
    """
    given = {name: None for name, value in kwargs.items() if is_cache(value) and not holds_tokens(value)}
    if not given:
        return args, kwargs
    return args, {**kwargs, **given, **({"use_cache": False} if "use_cache" in kwargs else {})}


def with_late_cache(output: Any, make: Callable[[str], Any]) -> Any:
    """A model's output, with a cache that is made when somebody reads it, in place of none.

    Args:
        output: of a call in which layers filled no cache.
        make: returns the cache that the output has under a name.
    """
    if not dataclasses.is_dataclass(output) or isinstance(output, type):
        return output
    given = {each.name: getattr(output, each.name) for each in dataclasses.fields(output)}
    name = next((name for name in CACHES if name in given), None)
    if name is None or not (given[name] is None or is_cache(given[name])):
        return output
    return type(output)(**{**given, name: _late_cache()(lambda: make(name))})


@functools.cache
def _late_cache() -> type:
    """The class of caches that are not made yet."""

    class LateCache(sys.modules["transformers"].DynamicCache):
        """Becomes the cache that a function makes as soon as something of it is read."""

        def __init__(self, make: Callable[[], Any]):
            self._make = make

        def __getattr__(self, name: str) -> Any:
            if hasattr(Tensor, name):  # whoever asks whether it is one
                raise AttributeError(name)
            return getattr(self._made(), name)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self._made().__reduce_ex__(protocol)

        def _made(self) -> Any:
            made = self._make()
            self.__class__ = type(made)
            vars(self).clear()
            vars(self).update(vars(made))
            return self

    return LateCache
