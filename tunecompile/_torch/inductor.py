"""AOTAutograd and Inductor: the two executors, their caches and workers, and torch's structured trace."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch._logging._internal import LazyTraceHandler, trace_log, trace_structured

from tunecompile._torch import known_bugs

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "Keep",
    "Turn",
    "Wrap",
    "cache_folder",
    "compile_eager",
    "compile_inductor",
    "default_cache_folder",
    "is_a_tensor",
    "is_tracing",
    "keeps_code",
    "min_cut_rematerialization_partition",
    "replacing",
    "start_compile_workers",
    "trace_artifact",
    "triton_kernel_wrap",
]


def start_compile_workers() -> None:
    """What a first compilation waits for, begun before it: Inductor's processes that compile Triton kernels need seconds to come up, in which it would
    compile one after the other, and Triton reads itself (for its cache's keys) and compiles its driver in C."""
    with contextlib.suppress(ImportError):  # only time is lost
        from torch._inductor.async_compile import maybe_warm_pool

        with _in_environment(
            TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS="1"
        ):  # they see no `config_patches`
            maybe_warm_pool()
        import triton

        threading.Thread(target=_prepare_triton, args=(triton,), name="tunecompile-triton", daemon=True).start()


def _prepare_triton(triton: Any) -> None:
    with contextlib.suppress(Exception):  # who needs it fails with the reason
        triton.runtime.driver.active.get_current_target()
        triton.runtime.cache.triton_key()


@contextlib.contextmanager
def _in_environment(**variables: str) -> Iterator[None]:
    """For processes that are started inside; what the user set stands."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


#: (compiled callable, "forward" or "backward", positions of parameters) -> the callable to run instead
Wrap = Callable[[Callable, str, Sequence[int]], Callable]

#: (graph, its fake inputs, "forward" or "backward"), both changed in place -> what to put around the compiled callable, if anything
Keep = Callable[[torch.fx.GraphModule, list, str], Callable[[Callable], Callable] | None]

#: (graph, its fake inputs) -> a context in which code is generated for it
Turn = Callable[[torch.fx.GraphModule, Sequence[Any]], contextlib.AbstractContextManager]


def _at_once(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def _keep_for_another_backward(kind: str | None) -> None:
    """Let no backward write into what its forward saved: with `retain_graph=True` it is needed again, and torch would refuse to run code that does
    (pytorch#130580). What is saved is freed as it is used all the same."""
    made = torch._guards.TracingContext.try_get()
    if kind == "backward" and made is not None and made.fw_metadata is not None:
        made.fw_metadata.bw_donated_idxs = []


def compile_inductor(
    gm: torch.fx.GraphModule,
    inputs: list,
    lower: CustomGraphPass,
    partition: CustomPartitionerFn,
    wrap: Wrap | None = None,
    keep: Keep | None = None,
    cached: bool = True,
    turn: Turn = _at_once,
) -> Callable:
    """turn: around the generation of code. cached: whether AOTAutograd may take both graphs from its cache, and so leave out the partitioner."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.output_code import CompiledFxGraph

    def inner(graph_module: torch.fx.GraphModule, example_inputs: list, **kwargs: Any) -> Any:
        kind, example_inputs = "backward" if kwargs.get("is_backward") else "forward", list(example_inputs)
        _keep_for_another_backward(kind)
        around = keep(graph_module, example_inputs, kind) if keep is not None else None
        with turn(graph_module, example_inputs):
            code = compile_fx_inner(graph_module, example_inputs, **kwargs)
        if (
            wrap is not None
            and isinstance(code, CompiledFxGraph)
            and not kwargs.get("is_inference")
            and not code.mutated_input_idxs
        ):
            code.current_callable = wrap(code.current_callable, kind, kwargs.get("static_input_idxs", ()))
        if around is not None:
            code.current_callable = around(code.current_callable)
        return code

    # combo_kernels joins small independent kernels (casts of adapters, sums of parts): 1,795 launches a step become 1,476 on a 1B model.
    # Templates start as Inductor's own kernels do, without a run of the C compiler for each, 0.1 s a kernel (its workers know from their environment).
    patches = {"post_grad_custom_pre_pass": lower, "custom_partitioner_fn": partition, "combo_kernels": True}
    if known_bugs.MIX_ORDER_REDUCTION.present:
        patches["triton.mix_order_reduction"] = False
    if hasattr(torch._inductor.config, "static_launch_user_defined_triton_kernels"):
        patches["static_launch_user_defined_triton_kernels"] = True
    # Both graphs at once: left to the first backward pass, code that cannot be generated would end the training there, where nothing can take its place.
    with torch._functorch.config.patch(
        enable_autograd_cache=wrap is None and cached, force_non_lazy_backward_lowering=True
    ):  # what comes from that cache is not wrapped
        return compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)


def compile_eager(
    gm: torch.fx.GraphModule,
    inputs: list,
    lower: CustomGraphPass,
    partition: CustomPartitionerFn,
    wrap: Wrap | None = None,
    keep: Keep | None = None,
    cached: bool = False,
    turn: Turn = _at_once,
) -> Callable:
    """The same pipeline, with the final graphs interpreted instead of compiled: seconds instead of minutes, for tests."""

    def compiler(kind: str | None) -> Callable:
        def run(graph_module: torch.fx.GraphModule, inputs: list) -> Callable:
            _keep_for_another_backward(kind)
            around = keep(graph_module, list(inputs), kind or "forward") if keep is not None else None
            lower(graph_module.graph)
            graph_module.recompile()
            called = boxed = make_boxed_func(graph_module.forward)
            if kind and wrap:
                called = wrap(called, kind, ())
            if around is not None:
                called = around(called)
            return boxed if called is boxed else make_boxed_func(lambda *args: called(list(args)))

        return run

    with torch._functorch.config.patch(
        force_non_lazy_backward_lowering=True
    ):  # no other thread compiles now, as one may during the backward pass
        return aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler(None),
            decompositions=select_decomp_table,
            partition_fn=lambda *args, **kwargs: partition(*args, compiler="inductor", **kwargs),
        )(gm, inputs)


def replacing(
    gm: torch.fx.GraphModule, told: Callable[[torch.fx.Node, str, torch.fx.Node], Any]
) -> contextlib.AbstractContextManager:
    """Inside, `told(old, new, user)` is called where a user of one node becomes another's, which is called `new`."""
    return gm._set_replace_hook(told)


def is_tracing() -> bool:
    """Inside a compilation: whether the user wants torch's structured trace (TORCH_TRACE=folder). Without a folder its handler goes at the first record."""
    return any(isinstance(handler, LazyTraceHandler) for handler in trace_log.handlers)


def is_a_tensor(value: Any) -> bool:
    """One that is traced, or what stands for one while Inductor lowers a graph."""
    inductor = sys.modules.get("torch._inductor.ir")
    return isinstance(value, torch.Tensor) or (inductor is not None and isinstance(value, inductor.TensorBox))


def trace_artifact(name: str, text: str) -> None:
    """One more file beside those of torch's own compiler, in what tlparse shows."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def cache_folder() -> Path:
    """Where Inductor keeps what it generated."""
    return Path(cache_dir())


def keeps_code() -> bool:
    """Whether Inductor looks there for code that was generated before."""
    return torch._inductor.config.fx_graph_cache and not torch._inductor.config.force_disable_caches


def default_cache_folder() -> Path:
    """The same where nobody says where."""
    return Path(default_cache_dir())
