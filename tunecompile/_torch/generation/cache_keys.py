"""Keys of Inductor's cache that are equal for equal graphs, wherever in memory their inputs lie.

Of weights and of what a forward saves, a key tells the bytes of the storage, and where in it the tensor begins. Code
depends on neither, but for whether it begins aligned. Yet weights of equal layers may be parts of storages of several
sizes, as engines hold them. And where two sizes are symbols, a tensor from an op has `a*b*c` bytes, and one that
torch's cache of fake results (or another process) made from its strides has `a*b*(c - 1) + a*b`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import torch
from sympy import expand

from tunecompile._torch.lookup import exist, need, replaced

_METADATA = "torch._inductor.codecache.extract_tensor_metadata_for_cache_key"
ALIGNMENT = 64  #: bytes, of any device that Inductor generates code for


@contextlib.contextmanager
def keys_without_storages() -> Iterator[None]:
    """Inside, keys tell of a tensor's storage only how the tensor is aligned in it. (See `replaced`.)"""
    if not exist(_METADATA):
        yield
        return
    plain, (module, _, name) = need(_METADATA), _METADATA.rpartition(".")

    def without_storage(value: torch.Tensor) -> Any:
        found = plain(value)
        return dataclasses.replace(found, storage_offset=_begin(found), storage_bytes=None)

    with replaced(sys.modules[module], **{name: without_storage}):
        yield


def _begin(found: Any) -> int | str:
    """How many values after an aligned one a tensor begins."""
    begin = found.storage_offset
    if isinstance(begin, torch.SymInt):
        return str(expand(begin.node.expr))
    return begin % max(1, ALIGNMENT // found.dtype.itemsize)
