"""Dynamo: guards, limits, constants in place of symbols, and calls of compiled functions."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from tunecompile._torch import known_bugs
from tunecompile._torch.distributed import around_now
from tunecompile._torch.lookup import NotRaised, exist, exists, lookup, patched

#: raised inside a backend to have Dynamo trace the function anew
TensorifyScalarRestartAnalysis = lookup("torch._dynamo.exc.TensorifyScalarRestartAnalysis", NotRaised)
#: an operation failed on fake tensors
TorchRuntimeError = lookup("torch._dynamo.exc.TorchRuntimeError", NotRaised)
reset = torch.compiler.reset  #: forget all graphs

_STATE = "torch._dynamo.symbolic_convert.TensorifyState"
_specialize = lookup(f"{_STATE}.specialize")
_is_special = lookup(f"{_STATE}.should_specialize")
#: after a compilation: the names of symbols that became constants would hold for those of later graphs
forget_specialized = lookup(f"{_STATE}.clear", lambda: None)
_CAN_SPECIALIZE = (
    _specialize is not None
    and _is_special is not None
    and exist("torch._dynamo.exc.TensorifyScalarRestartAnalysis", "torch.fx.experimental.sym_node.SymNode._expr")
)
_metrics = lookup("torch._dynamo.utils.get_metrics_context", lambda: None)
_compilation = lookup("torch._guards.CompileContext.try_get")
_compilation_id = lookup("torch._guards.CompileContext.current_compile_id", lambda: None)
_tracing = lookup("torch._guards.TracingContext.try_get", lambda: None)
_reset_code = lookup("torch._C._dynamo.eval_frame.reset_code")
_GUARDS = {"root", "diff_guard_root", "closure_vars"}  #: of a `GuardManagerWrapper`
_cache_entries = lookup("torch._dynamo.eval_frame._debug_get_cache_entry_list", lambda code: ())
_compile_lock = lookup("torch._dynamo.convert_frame.compile_lock")
_FLAG_IS_SHARED = exists("torch.fx._symbolic_trace._is_fx_tracing_flag")
_closure_patcher = lookup("torch._dynamo.config._make_closure_patcher")
_CUTS_FOR_DDP = exists("torch._dynamo.config.optimize_ddp")
_COLLECTS = exists("torch._dynamo.config.run_gc_after_compile")
_TAKES_INTEGERS = exists("torch._dynamo.config.allow_unspec_int_on_nn_module")
_TAGS_CRASH = known_bugs.GUARD_TAGS.present and exists("torch._dynamo.config.use_recursive_dict_tags_for_guards")
_CALLBACKS = "torch._dynamo.callback.callback_handler"
_at_start, _at_end = lookup(f"{_CALLBACKS}.start_callbacks"), lookup(f"{_CALLBACKS}.end_callbacks")
_maybe_mark_dynamic = lookup("torch._dynamo.maybe_mark_dynamic", lambda tensor, dims: None)


def recompile_reason() -> str | None:
    """Inside a backend: the guard whose failure made Dynamo compile this function again; None the first time."""
    return getattr(_metrics(), "_metrics", {}).get("recompile_reason")


def forget_with(owner: object, code: CodeType) -> Callable[[], None]:
    """Forget all graphs of a code object when `owner` is gone.

    Dynamo maps what it compiled to the code that it was compiled of, and the code keeps that in C, where no collector
    looks: neither would be freed before `reset`. Guards are kept by every long-lived object that one of them is about,
    and hidden states with a history by a cycle through autograd's C++ and Dynamo's list of inputs.

    Returns:
        A function to call inside the backend, once a graph.
    """
    environments: list[Any] = []

    def traced() -> None:
        environments.append(getattr(getattr(_tracing(), "fake_mode", None), "shape_env", None))

    weakref.finalize(owner, _forget, code, environments).atexit = False
    return traced


def _forget(code: CodeType, environments: list) -> None:
    if _reset_code is None:
        return
    guards = [getattr(entry, "guard_manager", None) for entry in _cache_entries(code)]
    _reset_code(code)  # before its guards go, which it points to
    for each in guards:
        for name in _GUARDS.intersection(vars(each) if each is not None else ()):
            setattr(each, name, None)
    for each in environments:
        if getattr(each, "tracked_fakes", None):
            each.tracked_fakes = None


def is_full(code: CodeType) -> bool:
    """Whether Dynamo has as many graphs of this code as it may, and makes no more.

    Other calls of it run eagerly, with all that they call.
    """
    return len(_cache_entries(code)) >= graph_limit()


def specialize_floats(gm: torch.fx.GraphModule) -> None:
    """Have Dynamo trace anew with constants in place of symbols of floats that differ between layers.

    Such floats are an epsilon, or an adapter's scale.

    Raises:
        TensorifyScalarRestartAnalysis: there were any. Dynamo catches it and comes back.
    """
    if not _CAN_SPECIALIZE:
        return
    symbols = {
        v.node._expr for node in gm.graph.nodes if isinstance(v := node.meta.get("example_value"), torch.SymFloat)
    }
    names = [
        symbol.name
        for symbol in symbols
        if getattr(symbol, "name", "").startswith("zf") and not _is_special(symbol.name)
    ]
    for name in names:
        _specialize(name)
    if names:
        raise TensorifyScalarRestartAnalysis


def remainders_as_constants(gm: torch.fx.GraphModule) -> None:
    """Inside a backend: remainders of integers that are symbols, and no sizes, are what they are now, by a guard."""
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    known = {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
    for node in gm.graph.find_nodes(op="call_function", target=operator.mod):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and not known & value.node.expr.free_symbols:
            node.replace_all_uses_with(int(value))
            gm.graph.erase_node(node)


def call_compiled(compiled: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function that `torch.compile` made.

    Before torch 2.15 it refuses while any thread traces: that flag is the process's (torch/_dynamo/eval_frame.py,
    pytorch#126024). Another thread traces under Dynamo's lock, so the call is repeated when the lock is free. A lock
    around each call would have threads run in turns.
    """
    if not _TAGS_CRASH or _closure_patcher is None:
        return _call_compiled(compiled, args, kwargs)
    as_it_was = _without_tags()()
    try:
        return _call_compiled(compiled, args, kwargs)
    finally:
        as_it_was()


@functools.cache
def _without_tags() -> Callable[[], Callable[[], None]]:
    """A function that sets how guards are made, and returns one that sets what was there."""
    return _closure_patcher(use_recursive_dict_tags_for_guards=False)


def _call_compiled(compiled: Callable, args: tuple, kwargs: dict) -> Any:
    while True:
        try:
            return compiled(*args, **kwargs)
        except RuntimeError as error:
            if "using FX to symbolically trace" not in str(error) or _was_inside(error):
                raise
            if _compile_lock is None or not _FLAG_IS_SHARED:
                raise
            with _compile_lock:
                if torch.fx._symbolic_trace._is_fx_tracing_flag:  # by the caller
                    raise


def _was_inside(error: BaseException) -> bool:
    """Whether a function that the compiled one calls raised it, so that some of it has run."""
    traceback = error.__traceback__
    return traceback is None or traceback.tb_next is None or traceback.tb_next.tb_next is not None


def call_whole(compiled: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call one layer, compiled or to be compiled now, as a single graph.

    Under DDP Dynamo would cut its graph where DDP's buckets end, so that gradients are sent while others are computed
    (torch/_dynamo/backends/distributed.py). A model compiled by layers has those cuts, and a pattern is found within a
    graph only.
    """
    if around_now() is None or not _CUTS_FOR_DDP:
        return call_compiled(compiled, *args, **kwargs)
    with _configured(optimize_ddp=False):
        return call_compiled(compiled, *args, **kwargs)


def tell_of_traces(begun: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
    """Call these in each thread in which Dynamo compiles, before its trace and after all. `reset` forgets them."""
    if _at_start is not None and _at_end is not None and begun not in _at_start:
        _at_start.append(begun)
        _at_end.append(ended)


def running(method: Callable) -> Any:
    """The object whose method this thread runs, innermost; None where it runs in none."""
    return next((frame.f_locals["self"] for frame in under_way() if frame.f_code is method.__code__), None)


def integers_may_change() -> contextlib.AbstractContextManager:
    """Inside, integers of modules that differ from those of an earlier graph become symbols, and are no constants."""
    return _configured(allow_unspec_int_on_nn_module=True) if _TAKES_INTEGERS else contextlib.nullcontext()


def uncollected() -> contextlib.AbstractContextManager:
    """Inside, Dynamo leaves what a compilation made to Python's cycle collector, and does not call it itself."""
    return _configured(run_gc_after_compile=False) if _COLLECTS else contextlib.nullcontext()


@contextlib.contextmanager
def _configured(**settings: bool) -> Iterator[None]:
    if _closure_patcher is None:
        with patched(torch._dynamo.config, **settings):
            yield
        return
    as_it_was = _closure_patcher(**settings)()
    try:
        yield
    finally:
        as_it_was()


def static_shapes() -> contextlib.AbstractContextManager:
    """Inside, Dynamo takes every size for a constant, whatever sizes it has seen before.

    Graphs of numbers are traced faster than those of symbols.
    """
    return patched(torch._dynamo.config, automatic_dynamic_shapes=False, assume_static_by_default=True)


def is_compiling() -> bool:
    """Whether the caller is being compiled or exported.

    torch's flag is the process's, and is set while another thread compiles (pytorch#118260).
    """
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling()
        or torch.compiler.is_exporting()
        or _compilation is None
        or _compilation() is not None
    )


def current_frame() -> int | None:
    """The number of the function that Dynamo compiles now: the same one, compiled again, keeps it.

    None outside a compilation.
    """
    return getattr(_compilation_id(), "frame_id", None)


def graph_limit() -> int:
    """How many graphs of one code object Dynamo makes before it leaves calls eager."""
    return getattr(torch._dynamo.config, "recompile_limit", 8)


def mark_dynamic(tensor: torch.Tensor, dims: int | list[int]) -> None:
    """Sizes along these dimensions may change: symbols, where Dynamo can.

    Does nothing where the tensor is marked already.
    """
    if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):
        _maybe_mark_dynamic(tensor, dims)


def under_way() -> Iterator[FrameType]:
    """Python's frames: the functions under way, from the one that iterates outwards."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
