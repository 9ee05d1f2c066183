"""AOTAutograd and Inductor: the two executors, their caches, and torch's structured trace."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tunecompile._torch import known_bugs
from tunecompile._torch.fake_tensors import select_decomp_table
from tunecompile._torch.generation import code_of_layers
from tunecompile._torch.generation.late_kernels import LateKernels
from tunecompile._torch.generation.quick_tuning import tuned_quickly
from tunecompile._torch.lookup import exist, exists, lookup, need, patched
from tunecompile._torch.saved_strides import hooks_were_seen, with_strides

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
else:
    CustomGraphPass = lookup("torch._inductor.custom_graph_pass.CustomGraphPass", object)
    CustomPartitionerFn = lookup("torch._inductor.custom_graph_pass.CustomPartitionerFn", object)


aot_autograd = lookup("torch._dynamo.backends.common.aot_autograd")
make_boxed_func = lookup("torch._functorch.aot_autograd.make_boxed_func")
#: AOTAutograd's partitioner: cuts a joint graph in two, and recomputes cheap operations
min_cut_rematerialization_partition = lookup("torch._functorch.partitioners.min_cut_rematerialization_partition")
#: torch's module for launches of Triton kernels in graphs
triton_kernel_wrap = lookup("torch._higher_order_ops.triton_kernel_wrap")

_LOGGING = "torch._logging._internal"
_TRACES = exist("LazyTraceHandler", "trace_log", "trace_structured", under=_LOGGING)
_trace_log = lookup(f"{_LOGGING}.trace_log")
_trace_handler = lookup(f"{_LOGGING}.LazyTraceHandler")
_trace_structured = lookup(f"{_LOGGING}.trace_structured")

_TELLS_REPLACEMENTS = exists("torch.fx.GraphModule._set_replace_hook")
_GUARDS = "torch._guards.TracingContext"
_tracing = lookup(f"{_GUARDS}.try_get", lambda: None)
_CLEARS_DONATED = exist(f"{_GUARDS}.try_get", f"{_GUARDS}.fw_metadata") and exists(
    "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs"
)


_CODE = "torch._inductor.output_code.CompiledFxGraph"
_compiled_graph = lookup(_CODE)
_CAN_WRAP = exist(_CODE, f"{_CODE}.current_callable", f"{_CODE}.mutated_input_idxs")


def _default_cache_dir() -> str:
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")


def _cache_dir() -> str:
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _default_cache_dir()


_CACHES = "torch._inductor.runtime.cache_dir_utils"
_find_cache = lookup(f"{_CACHES}.cache_dir", _cache_dir)
_find_default_cache = lookup(f"{_CACHES}.default_cache_dir", _default_cache_dir)


#: (compiled callable, "forward" or "backward", positions of parameters) -> the callable to run instead
Wrap = Callable[[Callable, str, Sequence[int]], Callable]

#: (graph, its fake inputs, "forward" or "backward"), both changed in place -> what to put around the compiled callable,
#: if anything
Keep = Callable[[torch.fx.GraphModule, list, str], Callable[[Callable], Callable] | None]

#: (graph, its fake inputs) -> a context in which code is generated for it
Turn = Callable[[torch.fx.GraphModule, Sequence[Any]], contextlib.AbstractContextManager]


def _at_once(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def _keep_for_another_backward(kind: str | None) -> None:
    """Let no backward write into tensors that its forward saved.

    With `retain_graph=True` they are needed again, and torch would refuse to run code that writes into them
    (pytorch#130580). Each is freed when it is used all the same.
    """
    if kind != "backward" or not _CLEARS_DONATED:
        return
    made = _tracing()
    if made is not None and made.fw_metadata is not None:
        made.fw_metadata.bw_donated_idxs = []


def _functorch(**settings: Any) -> contextlib.AbstractContextManager:
    """AOTAutograd's configuration, inside.

    Both graphs are generated at once: left to the first backward pass, code that cannot be generated would end the
    training there, where nothing can take its place. And no other thread compiles while this one does, as one may
    during a backward pass.
    """
    if not _CLEARS_DONATED:
        settings["donated_buffer"] = False
    return patched(torch._functorch.config, force_non_lazy_backward_lowering=True, **settings)


#: how templates are launched: as Inductor's own kernels
_LAUNCHES = {"static_launch_user_defined_triton_kernels": True}


def _inductor_settings(
    inputs: list, lower: CustomGraphPass, partition: CustomPartitionerFn, combine: bool
) -> dict[str, Any]:
    """Inductor's configuration of one graph, as far as this version of torch knows it.

    combo_kernels joins small independent kernels (casts of adapters, sums of parts): 1,795 launches a step become 1,476
    on a 1B model. Templates start as Inductor's own kernels do, without a run of the C compiler for each, 0.1 s a
    kernel (its workers know from their environment). What is read of five tensors (4, without this) is recomputed
    by its second reader: a rotation's gradient, scaled by a norm's weight, would be written in fp32 otherwise,
    and the norm's gradient is two kernels then.
    """
    settings: dict[str, Any] = {"combo_kernels": combine, "realize_reads_threshold": 5, **_LAUNCHES}
    if known_bugs.MIX_ORDER_REDUCTION.present:
        settings["triton.mix_order_reduction"] = False
    if known_bugs.PADDING_GUARDS_SIZES.present and any(isinstance(each, torch.SymInt) for each in inputs):
        settings["shape_padding"] = False
    known = {name: value for name, value in settings.items() if exists(f"torch._inductor.config.{name}")}
    return {"post_grad_custom_pre_pass": lower, "custom_partitioner_fn": partition, **known}


def compile_inductor(
    gm: torch.fx.GraphModule,
    inputs: list,
    lower: CustomGraphPass,
    partition: CustomPartitionerFn,
    wrap: Wrap | None = None,
    keep: Keep | None = None,
    cached: bool = True,
    turn: Turn = _at_once,
    combine: bool = True,
    backward: bool = True,
) -> Callable:
    """Generate code for a graph of Dynamo, and for its backward.

    Args:
        gm: the graph.
        inputs: its fake inputs.
        lower: runs on both final graphs.
        partition: cuts the joint graph.
        wrap: see `Wrap`.
        keep: see `Keep`.
        cached: whether AOTAutograd may take both graphs from its cache, and so skip the partitioner.
        turn: around the generation of code.
        combine: whether small independent kernels are joined.
        backward: whether there is code for one; else none may be run.

    Raises:
        ImportError: this version of torch has no `compile_fx` where it was.
    """
    compile_fx, compile_fx_inner = (
        need(f"torch._inductor.compile_fx.{name}") for name in ("compile_fx", "compile_fx_inner")
    )
    if not _CAN_WRAP:
        wrap, keep = None, None
    late = LateKernels()

    def inner(graph_module: torch.fx.GraphModule, example_inputs: list, **kwargs: Any) -> Any:
        kind, example_inputs = "backward" if kwargs.get("is_backward") else "forward", list(example_inputs)
        if kind == "backward" and not backward:
            return make_boxed_func(_no_backward)
        _keep_for_another_backward(kind)
        around = keep(graph_module, example_inputs, kind) if keep is not None else None
        with code_of_layers(is_tracing()), turn(graph_module, example_inputs):
            code = _generate(late, kind, partial(compile_fx_inner, graph_module, example_inputs, **kwargs))
        if not _CAN_WRAP or not isinstance(code, _compiled_graph):
            return code
        code.current_callable = tuned_quickly(code.current_callable)
        if wrap is not None and not kwargs.get("is_inference") and not code.mutated_input_idxs:
            code.current_callable = wrap(code.current_callable, kind, kwargs.get("static_input_idxs", ()))
        if around is not None:
            code.current_callable = around(code.current_callable)
        if kind == "backward":
            code.current_callable = with_strides(code.current_callable, example_inputs)
        return code

    cached = cached and backward and wrap is None and not hooks_were_seen()  # graphs from that cache are not wrapped
    with _functorch(enable_autograd_cache=cached):
        compiled = compile_fx(
            gm, inputs, inner_compile=inner, config_patches=_inductor_settings(inputs, lower, partition, combine)
        )
    with patched(torch._inductor.config, **_LAUNCHES):
        late.finish()  # where there was no second graph
    return compiled


def _generate(late: LateKernels, kind: str, generate: Callable) -> Any:
    """Generate code for one graph. Kernels of a forward may come when the code of its backward is there."""
    if kind == "forward":
        with late.around():
            late.code = generate()
        return late.code
    code = generate()
    late.finish()
    return code


def compile_eager(
    gm: torch.fx.GraphModule,
    inputs: list,
    lower: CustomGraphPass,
    partition: CustomPartitionerFn,
    wrap: Wrap | None = None,
    keep: Keep | None = None,
    cached: bool = False,
    turn: Turn = _at_once,
    combine: bool = True,
    backward: bool = True,
) -> Callable:
    """The same pipeline, with the final graphs interpreted instead of compiled.

    It takes seconds instead of minutes, for tests.
    """

    def compiler(kind: str | None) -> Callable:
        def run(graph_module: torch.fx.GraphModule, inputs: list) -> Callable:
            _keep_for_another_backward(kind)
            inputs = list(inputs)
            if kind == "backward" and not backward:
                return make_boxed_func(_no_backward)
            around = keep(graph_module, inputs, kind or "forward") if keep is not None else None
            lower(graph_module.graph)
            graph_module.recompile()
            called = boxed = make_boxed_func(graph_module.forward)
            if kind and wrap:
                called = wrap(called, kind, ())
            if around is not None:
                called = around(called)
            if kind == "backward":
                called = with_strides(called, inputs)  # those that `keep` has put there
            return boxed if called is boxed else make_boxed_func(lambda *args: called(list(args)))

        return run

    with _functorch():
        return aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler(None),
            decompositions=select_decomp_table,
            partition_fn=lambda *args, **kwargs: partition(*args, compiler="inductor", **kwargs),
        )(gm, inputs)


def _no_backward(*_: Any) -> Any:
    raise RuntimeError("this forward was compiled for scores, which have no backward")


def replacing(
    gm: torch.fx.GraphModule, notify: Callable[[torch.fx.Node, str, torch.fx.Node], Any]
) -> contextlib.AbstractContextManager:
    """Inside, `notify(old, new, user)` is called where `user` reads the node named `new` in the place of `old`."""
    return gm._set_replace_hook(notify) if _TELLS_REPLACEMENTS else contextlib.nullcontext()


def is_tracing() -> bool:
    """Inside a compilation: whether the user wants torch's structured trace (TORCH_TRACE=folder).

    Without a folder its handler goes at the first record.
    """
    return _TRACES and any(isinstance(handler, _trace_handler) for handler in _trace_log.handlers)


def is_a_tensor(value: Any) -> bool:
    """Whether it is a tensor that is traced, or its representation while Inductor lowers a graph."""
    box = getattr(sys.modules.get("torch._inductor.ir"), "TensorBox", None)
    return isinstance(value, torch.Tensor) or (box is not None and isinstance(value, box))


def trace_artifact(name: str, text: str) -> None:
    """One more file beside those of torch's own compiler, in the pages of tlparse."""
    if _TRACES:
        _trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def cache_folder() -> Path:
    """The folder of Inductor's caches."""
    return Path(_find_cache())


def keeps_code() -> bool:
    """Whether Inductor looks in its caches for code that was generated before. No, where torch does not tell."""
    config = torch._inductor.config
    return getattr(config, "fx_graph_cache", False) and not getattr(config, "force_disable_caches", True)


def default_cache_folder() -> Path:
    """The folder of Inductor's caches where no configuration names one."""
    return Path(_find_default_cache())
