"""Fake tensors and make_fx: graphs of functions without data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from sympy import Expr
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tunecompile._torch.autograd import no_autocast

__all__ = [
    "Expr",
    "FakeTensorMode",
    "StorageWeakRef",
    "enable_python_dispatcher",
    "fake_mode_of",
    "free_unbacked_symbols",
    "make_fx",
    "size_hint",
    "trace",
]


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """The mode of the first fake tensor. (`detect_fake_mode` prefers the tracing context's, and Dynamo gives backends a fresh one.)"""
    leaves = torch.utils._pytree.tree_leaves(values)
    return next((value.fake_mode for value in leaves if isinstance(value, FakeTensor)), None)


def trace(fn: Callable, args: tuple, fake_mode: FakeTensorMode | None) -> torch.fx.GraphModule:
    """Trace `fn` on fake tensors to core ATen, with the decompositions Inductor would use.

    `triton` launches inside `fn` become functional `triton_kernel_wrapper` nodes, so that no mutation enters the graph.
    """
    mode = fake_mode if fake_mode is not None else contextlib.nullcontext()
    with mode, enable_python_dispatcher(), torch.no_grad(), no_autocast(), torch.fx.traceback.preserve_node_meta():
        return make_fx(torch.func.functionalize(fn), select_decomp_table(), tracing_mode="real")(*args)


def size_hint(size: int | torch.SymInt) -> int:
    """A size, or of a symbol the size it was compiled for; 0 without one."""
    return size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else 0


def is_fake(value: Any) -> bool:
    """Whether a tensor has no data."""
    return isinstance(value, FakeTensor)


dispatch_mode = _get_current_dispatch_mode  #: the innermost mode that sees every operation, None where there is none
