"""Dynamo: guards, limits, constants in place of symbols, and calls of compiled functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, TorchRuntimeError
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import get_metrics_context
from torch._guards import CompileContext

from tunecompile._torch.distributed import around_now

__all__ = [
    "TensorifyScalarRestartAnalysis",
    "TorchRuntimeError",
    "call_compiled",
    "call_whole",
    "current_frame",
    "is_compiling",
    "is_full",
    "recompile_reason",
    "specialize_floats",
    "static_shapes",
]


def recompile_reason() -> str | None:
    """Inside a backend: the guard whose failure made Dynamo compile this function again; None the first time."""
    return getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")


def is_full(code: CodeType) -> bool:
    """Whether Dynamo has as many graphs of this code as it may, and makes no more: others run eagerly, with all that they call."""
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(code)) >= torch._dynamo.config.recompile_limit


def specialize_floats(gm: torch.fx.GraphModule) -> None:
    """Have Dynamo trace anew with constants where it made symbols of floats (an epsilon, an adapter's scale) that differ between layers.

    Raises:
        TensorifyScalarRestartAnalysis: there were any. Dynamo catches it and comes back.
    """
    symbols = {
        v.node._expr for node in gm.graph.nodes if isinstance(v := node.meta.get("example_value"), torch.SymFloat)
    }
    names = [
        symbol.name
        for symbol in symbols
        if getattr(symbol, "name", "").startswith("zf") and not TensorifyState.should_specialize(symbol.name)
    ]
    for name in names:
        TensorifyState.specialize(name)
    if names:
        raise TensorifyScalarRestartAnalysis


def call_compiled(compiled: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call what `torch.compile` made. It refuses while any thread traces: that flag is the process's (torch/_dynamo/eval_frame.py, pytorch#126024). What another
    thread traces it traces under Dynamo's lock, so the call is made again when that is free. A lock around each call would have threads run in turns."""
    while True:
        try:
            return compiled(*args, **kwargs)
        except RuntimeError as error:
            if (
                "using FX to symbolically trace" not in str(error) or error.__traceback__.tb_next.tb_next is not None
            ):  # something inside has run, and failed
                raise
            with compile_lock:
                if torch.fx._symbolic_trace._is_fx_tracing_flag:  # by the caller
                    raise


def call_whole(compiled: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call what is one layer, compiled or to be compiled now. Under DDP Dynamo would cut its graph where DDP's buckets end, so that gradients are sent
    while others are computed (torch/_dynamo/backends/distributed.py). A model compiled by layers has those cuts, and a pattern is found in one piece only."""
    if around_now() is None:
        return call_compiled(compiled, *args, **kwargs)
    as_it_was = torch._dynamo.config._make_closure_patcher(optimize_ddp=False)()
    try:
        return call_compiled(compiled, *args, **kwargs)
    finally:
        as_it_was()


def static_shapes() -> contextlib.AbstractContextManager:
    """Inside, Dynamo takes every size for a constant, whatever sizes it has seen before: graphs of numbers are traced faster than those of symbols."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True)


def is_compiling() -> bool:
    """Whether what calls this is being compiled or exported. torch's flag is the process's, and is set while another thread compiles (pytorch#118260)."""
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or CompileContext.try_get() is not None
    )


def current_frame() -> int | None:
    """Which function Dynamo compiles now: the same one once more keeps its number. None outside of a compilation."""
    made = CompileContext.current_compile_id()
    return made and made.frame_id


def graph_limit() -> int:
    """How many graphs of one code object Dynamo makes before it leaves calls eager."""
    return torch._dynamo.config.recompile_limit


def mark_dynamic(tensor: torch.Tensor, dims: int | list[int]) -> None:
    """Sizes along these dimensions may change: symbols, where Dynamo can. Nothing where the tensor is marked already."""
    if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):
        torch._dynamo.maybe_mark_dynamic(tensor, dims)


reset = torch._dynamo.reset  #: forget all graphs
