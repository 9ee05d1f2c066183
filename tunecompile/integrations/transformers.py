"""transformers' slots: the checkpointing function of a layer, and the attention functions of a model's configs."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
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


def static_cache(model: Any, length: int) -> Any:
    """An empty cache in fixed memory, in which nothing follows from numbers of the host.

    Layers with windows keep all tokens, too: transformers' own class for them counts tokens on the host, and rolls its
    memory from a certain token on. The mask has the window.

    Args:
        model: whose configuration says of which kind each layer's part is.
        length: of the longest row, in tokens.
    """
    from transformers import StaticCache, cache_utils

    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)
    whole = {
        "StaticSlidingWindowLayer": "StaticLayer",
        "LinearAttentionAndStaticSlidingWindowAttentionLayer": "LinearAttentionAndStaticFullAttentionLayer",
    }
    for index, layer in enumerate(cache.layers):
        if (name := whole.get(type(layer).__name__)) is not None:
            cache.layers[index] = getattr(cache_utils, name)(max_cache_len=length)
    return cache


#: layers of caches whose memory has rows as its first dimension, and tokens in keys and values alone
_OF_ROWS = {"StaticLayer", "LinearAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer"}
KEPT = ("keys", "values")  #: [rows, heads, tokens, width] of such a layer


def takes_parts(cache: Any) -> bool:
    """Whether rows of other caches can be put into an empty cache."""
    return all(type(layer).__name__ in _OF_ROWS for layer in cache.layers)


def put_rows(cache: Any, part: Any, rows: Tensor, count: int, tokens: int) -> None:
    """Put a part's rows into a cache, as those of so many tokens: what the part lacks in front is padding.

    Args:
        cache: `takes_parts`. It has memory from the first part on.
        part: of the same model, with rows that a prompt has filled.
        rows: int64, the number of each among the cache's.
        count: of the cache's rows.
        tokens: of all rows, padding included.
    """

    for layer, filled in zip(cache.layers, part.layers, strict=True):
        held = vars(layer)
        for name, value in vars(filled).items():
            if name in KEPT and isinstance(value, Tensor):
                before = held.get(name)
                if before is None:
                    before = held[name] = value.new_zeros(count, value.shape[1], layer.max_cache_len, value.shape[3])
                before[rows, :, tokens - value.shape[2] : tokens] = value
            elif name == "cumulative_length":
                held[name] = torch.full_like(value, tokens)
            elif name == "batch_size":
                held[name] = count
            elif name != "max_cache_len":
                held[name] = _with_rows(held.get(name), value, rows, count)


def _with_rows(whole: Any, value: Any, rows: Tensor, count: int) -> Any:
    """What a cache holds of a recurrence, with a part's rows; any other value is the part's."""
    if isinstance(value, dict):
        before = whole or {}
        return {key: _with_rows(before.get(key), each, rows, count) for key, each in value.items()}
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    made = value.new_zeros(count, *value.shape[1:]) if not isinstance(whole, Tensor) else whole
    made[rows] = value
    return made


def repeat_rows(cache: Any, rows: Tensor) -> None:
    """Put rows of a cache in the place of its rows. rows: int64, the number of each new one among the old ones."""

    def repeated(value: Any) -> Any:
        return value.index_select(0, rows) if isinstance(value, Tensor) and value.dim() > 1 else value

    for layer in cache.layers:
        held = vars(layer)
        for name, value in list(held.items()):
            held[name] = {k: repeated(v) for k, v in value.items()} if type(value) is dict else repeated(value)
        if "batch_size" in held:
            held["batch_size"] = len(rows)
