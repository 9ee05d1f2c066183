"""Keys of Inductor's cache that are equal for equal graphs, whichever way their values were made.

A saved tensor's key tells the bytes of its storage. Where two sizes are symbols, a tensor from an op has `a*b*c` bytes,
and one that torch's cache of fake results (or another process) made from its strides has `a*b*(c - 1) + a*b`.
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

__all__ = ["storages_in_one_form"]

_METADATA = "torch._inductor.codecache.extract_tensor_metadata_for_cache_key"


@contextlib.contextmanager
def storages_in_one_form() -> Iterator[None]:
    """Inside, keys have bytes of storages as sums of products. (See `replaced`.)"""
    if not exist(_METADATA):
        yield
        return
    plain, (module, _, name) = need(_METADATA), _METADATA.rpartition(".")

    def in_one_form(value: torch.Tensor) -> Any:
        found = plain(value)
        size = found.storage_bytes
        return dataclasses.replace(found, storage_bytes=_expanded(size)) if isinstance(size, torch.SymInt) else found

    with replaced(sys.modules[module], **{name: in_one_form}):
        yield


def _expanded(size: torch.SymInt) -> str:
    return str(expand(size.node.expr))
