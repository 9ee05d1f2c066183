"""Inductor's code where a cache has it, and only there."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from tunecompile._torch.lookup import exist, lookup

__all__ = ["CAN_LOOK", "NotCached", "cached_only"]

_COMPILE_FX = "torch._inductor.compile_fx"
_CACHE = "torch._inductor.codecache.FxGraphCache"
_compile_fx: Any = lookup(_COMPILE_FX)
_cache: Any = lookup(_CACHE)
#: whether this version of torch has what this needs
CAN_LOOK = exist(_COMPILE_FX, f"{_COMPILE_FX}.fx_codegen_and_compile", f"{_CACHE}.load_with_key")


class NotCached(BaseException):
    """No cache has this code. (Not an `Exception`: Inductor would wrap it.)

    Args:
        key: that it would have there.
    """

    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


@contextlib.contextmanager
def cached_only(but: Collection[str] | None) -> Iterator[list[str]]:
    """Inside, Inductor raises `NotCached` where it would generate code that belongs in its cache.

    Two functions of torch's are replaced for the process: call it inside a compilation, where Dynamo's lock keeps
    others out.

    Args:
        but: keys whose code is generated all the same; None for all.

    Yields:
        Those of which code was generated.
    """
    generate, load = _compile_fx.fx_codegen_and_compile, _cache.load_with_key
    looked: list[str] = []
    generated: list[str] = []

    def load_with_key(key: str, *args: Any, **kwargs: Any) -> Any:
        looked.append(key)
        return load(key, *args, **kwargs)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if looked and but is not None and looked[-1] not in but:
            raise NotCached(looked[-1])
        generated.extend(looked[-1:])
        return generate(*args, **kwargs)  # what is cached nowhere is of no use to another process either

    _compile_fx.fx_codegen_and_compile, _cache.load_with_key = refuse, staticmethod(load_with_key)
    try:
        yield generated
    finally:
        _compile_fx.fx_codegen_and_compile, _cache.load_with_key = generate, staticmethod(load)
