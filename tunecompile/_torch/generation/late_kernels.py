"""Kernels of a layer's forward compile while code for its backward is generated.

Inductor's processes compile kernels, and it waits for those of each graph as it loads the graph's code, since it keeps
both in one cache entry. `LateKernels` has it wait for the first graph's, and write that entry, once there is code for
the second one: nobody runs either before.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tunecompile._torch.distributed import several
from tunecompile._torch.lookup import NotRaised, exist, lookup

_async_compile = lookup("torch._inductor.async_compile.AsyncCompile")
_graph_cache = lookup("torch._inductor.codecache.FxGraphCache")
_bundler = lookup("torch._inductor.triton_bundler.TritonBundler")
_BUNDLER = "torch._inductor.triton_bundler.TritonBundler"
_CAN_WAIT = exist(
    "torch._inductor.async_compile.AsyncCompile.wait",
    "torch._inductor.codecache.FxGraphCache._save_graph",
    "torch._inductor.output_code.CompiledFxGraph.set_triton_bundle",
) and exist("begin_compile", "collect", "end_compile", under=_BUNDLER)

#: Inductor could not generate code
InductorError = lookup("torch._inductor.exc.InductorError", NotRaised)

#: settings under which Inductor runs kernels while it generates code
_RUNS_KERNELS = ("benchmark_fusion", "benchmark_kernel", "benchmark_combo_kernel", "cpp_wrapper", "triton.multi_kernel")


class LateKernels:
    """Of the graphs of one compilation, the first one's kernels, and what is done when they are there."""

    def __init__(self) -> None:
        self.waits: list[tuple[Any, dict[str, Any]]] = []  #: (torch's object, the module whose kernels are awaited)
        self.saves: list[tuple] = []  #: arguments of writing a cache entry
        self.code: Any = None  #: the first graph's
        self.begun = not _allowed()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the code generation of one graph; not to be called for graphs that have no other one behind them.

        Methods of torch's classes are replaced for the process: call it inside a compilation, where Dynamo's lock keeps
        others out. Calls of other threads pass through.
        """
        if self.begun:
            yield
            return
        self.begun, here = True, threading.get_ident()
        wait, save = _async_compile.wait, inspect.getattr_static(_graph_cache, "_save_graph")
        write: Callable = _graph_cache._save_graph

        def wait_later(compiler: Any, scope: dict[str, Any]) -> None:
            if threading.get_ident() != here:
                return wait(compiler, scope)
            self.waits.append((compiler, scope))

        def save_later(*args: Any) -> None:
            if threading.get_ident() != here:
                return write(*args)
            self.saves.append(args)

        _async_compile.wait, _graph_cache._save_graph = wait_later, staticmethod(save_later)
        try:
            yield
        finally:
            _async_compile.wait, _graph_cache._save_graph = wait, save

    def finish(self) -> None:
        """Wait, and write the cache entry with these kernels.

        Raises:
            InductorError: a kernel could not be compiled.
        """
        waits, saves, code = self.waits, self.saves, self.code
        self.waits, self.saves, self.code = [], [], None
        if not waits:
            return
        _bundler.begin_compile()
        try:
            for compiler, scope in waits:
                compiler.wait(scope)
            bundle, _ = _bundler.collect()
        except Exception as error:
            raise InductorError(error, inspect.currentframe()).with_traceback(error.__traceback__) from None
        finally:
            _bundler.end_compile()
        if saves:
            code.set_triton_bundle(bundle)
        for arguments in saves:
            _graph_cache._save_graph(*arguments)


def _allowed() -> bool:
    """Whether kernels can come late: no other rank waits for the cache entry, AOTAutograd writes none with them, and
    none of them runs before.
    """
    bundled = getattr(torch._functorch.config, "bundled_autograd_cache", False)
    return _CAN_WAIT and not several() and not bundled and not any(map(_is_on, _RUNS_KERNELS))


def _is_on(setting: str) -> bool:
    value: Any = torch._inductor.config
    for name in setting.split("."):
        value = getattr(value, name, False)
    return bool(value)
