"""Inductor's code where a cache has it, and only there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

from tunecompile._torch.lookup import exist, need, replaced

__all__ = ["NotCached", "cached_only", "can_look"]

_GENERATE = "torch._inductor.compile_fx.fx_codegen_and_compile"
_CACHE = "torch._inductor.codecache.FxGraphCache"


def can_look() -> bool:
    """Whether this version of torch has what this needs. (Asked late: torch's compiler takes long to import.)"""
    return exist(_GENERATE, f"{_CACHE}.load_with_key")


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
    """Inside, Inductor raises `NotCached` where it would generate code that belongs in its cache. (See `replaced`.)

    Args:
        but: keys whose code is generated all the same; None for all.

    Yields:
        Those of which code was generated.
    """
    generate, cache = need(_GENERATE), need(_CACHE)
    compile_fx, load = sys.modules[_GENERATE.rpartition(".")[0]], cache.load_with_key
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

    with (
        replaced(compile_fx, fx_codegen_and_compile=refuse),
        replaced(cache, load_with_key=staticmethod(load_with_key)),
    ):
        yield generated
