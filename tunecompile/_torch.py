"""Every private torch import of the project, in one place. Checked on torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Any, Callable, Iterator, Sequence

import torch
from sympy import Expr
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, TorchRuntimeError
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import get_metrics_context
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch._logging._internal import LazyTraceHandler, trace_log, trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _reparametrize_module as reparametrized
from torch.utils.checkpoint import CheckpointPolicy

from tunecompile import upstream

__all__ = [
    "HOOKS", "CheckpointPolicy", "CustomGraphPass", "CustomPartitionerFn", "Expr", "FakeTensor", "FakeTensorMode", "StorageWeakRef", "TensorifyScalarRestartAnalysis",
    "TorchRuntimeError", "around_now", "attention_order", "cache_folder", "call_compiled", "call_whole", "compile_eager", "compile_inductor", "default_cache_folder",
    "differentiable_outputs", "enable_python_dispatcher", "fake_mode_of", "free_unbacked_symbols", "fsdp_groups", "fsdp_groups_behind", "global_hooks", "grow_segments",
    "hooked", "in_checkpoint", "is_a_tensor", "is_compiling", "is_full", "is_of", "is_tracing", "keeps_code", "keeps_graph", "linear", "local_part", "meeting_store",
    "min_cut_rematerialization_partition", "no_autocast", "occupy_gpu", "outside_compilation", "recompile_reason", "reparametrized", "replacing", "saving_is_taken",
    "size_hint", "specialize_floats", "start_compile_workers", "static_shapes", "trace", "trace_artifact", "triton_kernel_wrap",
]

no_autocast = torch._C._DisableAutocast
linear = torch._C._nn.linear  #: what `torch.nn.functional.linear` is, until DeepSpeed's ZeRO-3 puts another function in its place (tunecompile/zero.py)


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """The mode of the first fake tensor. (`detect_fake_mode` prefers the tracing context's, and Dynamo gives backends a fresh one.)"""
    leaves = torch.utils._pytree.tree_leaves(values)
    return next((value.fake_mode for value in leaves if isinstance(value, FakeTensor)), None)


def recompile_reason() -> str | None:
    """Inside a backend: the guard whose failure made Dynamo compile this function again; None the first time."""
    return getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")


def is_full(code: CodeType) -> bool:
    """Whether Dynamo has as many graphs of this code as it may, and makes no more: others run eagerly, with all that they call."""
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(code)) >= torch._dynamo.config.recompile_limit


def in_checkpoint() -> bool:
    """Whether a non-reentrant `torch.utils.checkpoint` is under way: it will repeat what is called now, in the backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def saving_is_taken() -> str | None:
    """Why hooks for saved tensors must not be set now; None where they may. (Autograd calls the innermost hooks only.)"""
    if torch._C._current_graph_task_id() != -1:
        return "recomputed in the backward pass, where it is used at once"
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        return "hooks for saved tensors are forbidden here (torch.func)"
    if in_checkpoint():
        return "inside a checkpoint"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "other hooks take the saved tensors"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "recorded as a CUDA graph, whose memory is its own"
    return None


def specialize_floats(gm: torch.fx.GraphModule) -> None:
    """Have Dynamo trace anew with constants where it made symbols of floats (an epsilon, an adapter's scale) that differ between layers.

    Raises:
        TensorifyScalarRestartAnalysis: there were any. Dynamo catches it and comes back.
    """
    symbols = {v.node._expr for node in gm.graph.nodes if isinstance(v := node.meta.get("example_value"), torch.SymFloat)}
    names = [symbol.name for symbol in symbols if getattr(symbol, "name", "").startswith("zf") and not TensorifyState.should_specialize(symbol.name)]
    for name in names:
        TensorifyState.specialize(name)
    if names:
        raise TensorifyScalarRestartAnalysis


def trace(fn: Callable, args: tuple, fake_mode: FakeTensorMode | None) -> torch.fx.GraphModule:
    """Trace `fn` on fake tensors to core ATen, with the decompositions Inductor would use.

    `triton` launches inside `fn` become functional `triton_kernel_wrapper` nodes, so that no mutation enters the graph.
    """
    mode = fake_mode if fake_mode is not None else contextlib.nullcontext()
    with mode, enable_python_dispatcher(), torch.no_grad(), no_autocast(), torch.fx.traceback.preserve_node_meta():
        return make_fx(torch.func.functionalize(fn), select_decomp_table(), tracing_mode="real")(*args)


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  #: where a module keeps them


def global_hooks() -> tuple[dict[int, Callable], ...]:
    """Those that calls of all modules call, by kind in the order of `HOOKS`. Nothing where there are none."""
    of = torch.nn.modules.module
    return (of._global_forward_pre_hooks, of._global_forward_hooks, of._global_backward_pre_hooks, of._global_backward_hooks) if of._has_any_global_hook() else ()


def hooked(module: torch.nn.Module) -> bool:
    """Whether calling it, or its backward, calls hooks."""
    return any(getattr(part, name) for part in module.modules() for name in HOOKS) or bool(global_hooks())


def is_of(hook: Callable, packages: tuple[str, ...]) -> bool:
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(packages)


def differentiable_outputs(node: torch.autograd.graph.Node) -> set[int] | None:
    """Which outputs of a compiled graph's node have a history. Views are made outside of it. None of another node."""
    made = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
    if not isinstance(made, ViewAndMutationMeta):
        return None
    start = made.num_mutated_inp_runtime_indices
    return {start + at for at, output in enumerate(made.output_info) if output.requires_grad and output.output_type is OutputType.non_alias}


def keeps_graph() -> bool:
    """In a backward pass: whether the caller retains its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def start_compile_workers() -> None:
    """What a first compilation waits for, begun before it: Inductor's processes that compile Triton kernels need seconds to come up, in which it would
    compile one after the other, and Triton reads itself (for its cache's keys) and compiles its driver in C."""
    with contextlib.suppress(ImportError):  # only time is lost
        from torch._inductor.async_compile import maybe_warm_pool

        with _in_environment(TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS="1"):  # they see no `config_patches`
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


def grow_segments() -> None:
    """Let torch's CUDA allocator map pages to segments that grow, and so leave less between blocks unused: 0.4 GiB instead of 1.0 under a
    budget of 10 GiB (8B, 4x2048). What the user configured stands, and vLLM exports memory to other processes in a way that wants whole segments
    (vllm#42609)."""
    configured = any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")) \
        or getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")()
    if sys.platform != "linux" or configured or "vllm" in sys.modules or torch.cuda.get_allocator_backend() != "native":
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        torch.empty(1 << 25, dtype=torch.uint8, device="cuda")  # of virtual GPUs, some have no such mapping
    except torch.OutOfMemoryError:
        pass
    except RuntimeError:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


#: (compiled callable, "forward" or "backward", positions of parameters) -> the callable to run instead
Wrap = Callable[[Callable, str, Sequence[int]], Callable]


#: (graph, its fake inputs, "forward" or "backward"), both changed in place -> what to put around the compiled callable, if anything
Keep = Callable[[torch.fx.GraphModule, list, str], Callable[[Callable], Callable] | None]


#: (graph, its fake inputs) -> a context in which code is generated for it
Turn = Callable[[torch.fx.GraphModule, Sequence[Any]], contextlib.AbstractContextManager]


def _at_once(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def call_compiled(compiled: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call what `torch.compile` made. It refuses while any thread traces: that flag is the process's (torch/_dynamo/eval_frame.py, pytorch#126024). What another
    thread traces it traces under Dynamo's lock, so the call is made again when that is free. A lock around each call would have threads run in turns."""
    while True:
        try:
            return compiled(*args, **kwargs)
        except RuntimeError as error:
            if "using FX to symbolically trace" not in str(error) or error.__traceback__.tb_next.tb_next is not None:  # something inside has run, and failed
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


def around_now() -> DistributedDataParallel | None:
    """The wrapper inside whose forward this is, if any."""
    return DistributedDataParallel._get_active_ddp_module()


def _keep_for_another_backward(kind: str | None) -> None:
    """Let no backward write into what its forward saved: with `retain_graph=True` it is needed again, and torch would refuse to run code that does
    (pytorch#130580). What is saved is freed as it is used all the same."""
    made = torch._guards.TracingContext.try_get()
    if kind == "backward" and made is not None and made.fw_metadata is not None:
        made.fw_metadata.bw_donated_idxs = []


def compile_inductor(gm: torch.fx.GraphModule, inputs: list, lower: CustomGraphPass, partition: CustomPartitionerFn, wrap: Wrap | None = None,
                     keep: Keep | None = None, cached: bool = True, turn: Turn = _at_once) -> Callable:
    """turn: around the generation of code. cached: whether AOTAutograd may take both graphs from its cache, and so leave out the partitioner."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.output_code import CompiledFxGraph

    def inner(graph_module: torch.fx.GraphModule, example_inputs: list, **kwargs: Any) -> Any:
        kind, example_inputs = "backward" if kwargs.get("is_backward") else "forward", list(example_inputs)
        _keep_for_another_backward(kind)
        around = keep(graph_module, example_inputs, kind) if keep is not None else None
        with turn(graph_module, example_inputs):
            code = compile_fx_inner(graph_module, example_inputs, **kwargs)
        if wrap is not None and isinstance(code, CompiledFxGraph) and not kwargs.get("is_inference") and not code.mutated_input_idxs:
            code.current_callable = wrap(code.current_callable, kind, kwargs.get("static_input_idxs", ()))
        if around is not None:
            code.current_callable = around(code.current_callable)
        return code

    # combo_kernels joins small independent kernels (casts of adapters, sums of parts): 1,795 launches a step become 1,476 on a 1B model.
    # Templates start as Inductor's own kernels do, without a run of the C compiler for each, 0.1 s a kernel (its workers know from their environment).
    patches = {"post_grad_custom_pre_pass": lower, "custom_partitioner_fn": partition, "combo_kernels": True}
    if upstream.MIX_ORDER_REDUCTION.present:
        patches["triton.mix_order_reduction"] = False
    if hasattr(torch._inductor.config, "static_launch_user_defined_triton_kernels"):
        patches["static_launch_user_defined_triton_kernels"] = True
    # Both graphs at once: left to the first backward pass, code that cannot be generated would end the training there, where nothing can take its place.
    with torch._functorch.config.patch(enable_autograd_cache=wrap is None and cached, force_non_lazy_backward_lowering=True):  # what comes from that cache is not wrapped
        return compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)


def compile_eager(gm: torch.fx.GraphModule, inputs: list, lower: CustomGraphPass, partition: CustomPartitionerFn, wrap: Wrap | None = None,
                  keep: Keep | None = None, cached: bool = False, turn: Turn = _at_once) -> Callable:
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

    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):  # no other thread compiles now, as one may during the backward pass
        return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler(None), decompositions=select_decomp_table,
                            partition_fn=lambda *args, **kwargs: partition(*args, compiler="inductor", **kwargs))(gm, inputs)


@contextlib.contextmanager
def attention_order(names: Sequence[str]):
    """F.scaled_dot_product_attention takes the first of these ("cudnn", "flash", "efficient", "math") that supports its arguments, and no other."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    with sdpa_kernel([backends[name] for name in names], set_priority=True):
        yield


@contextlib.contextmanager
def outside_compilation():
    """Inside a backend: real tensors, whatever autocast and whichever fake mode it was called under."""
    with unset_fake_temporarily(), no_autocast():
        yield


def static_shapes() -> contextlib.AbstractContextManager:
    """Inside, Dynamo takes every size for a constant, whatever sizes it has seen before: graphs of numbers are traced faster than those of symbols."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True)


def occupy_gpu(cycles: int = 2_000_000) -> None:
    """The current stream waits for about a millisecond, while the host goes on."""
    torch.cuda._sleep(cycles)


def replacing(gm: torch.fx.GraphModule, told: Callable[[torch.fx.Node, str, torch.fx.Node], Any]) -> contextlib.AbstractContextManager:
    """Inside, `told(old, new, user)` is called where a user of one node becomes another's, which is called `new`."""
    return gm._set_replace_hook(told)


def is_compiling() -> bool:
    """Whether what calls this is being compiled or exported. torch's flag is the process's, and is set while another thread compiles (pytorch#118260)."""
    return torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or CompileContext.try_get() is not None)


def others_trace() -> bool:
    """Whether the model runs in a trace that is not ours: compiled from outside, or under a transform of `torch.func` or of forward-mode derivatives. Tensors
    of these have no storage, and ordinary autograd functions, as compiled code is one, refuse them."""
    return is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def is_tracing() -> bool:
    """Inside a compilation: whether the user wants torch's structured trace (TORCH_TRACE=folder). Without a folder its handler goes at the first record."""
    return any(isinstance(handler, LazyTraceHandler) for handler in trace_log.handlers)


def is_a_tensor(value: Any) -> bool:
    """One that is traced, or what stands for one while Inductor lowers a graph."""
    inductor = sys.modules.get("torch._inductor.ir")
    return isinstance(value, torch.Tensor) or inductor is not None and isinstance(value, inductor.TensorBox)


def trace_artifact(name: str, text: str) -> None:
    """One more file beside those of torch's own compiler, in what tlparse shows."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def meeting_store(prefix: str) -> Any:
    """Keys with this prefix in the store in which the ranks of the default group met, by a connection of our own: torch's may wait for another rank,
    with a lock on it. None where there is no such store (a group for tests)."""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        return torch.distributed.PrefixStore(prefix, _get_default_store().clone())
    except RuntimeError:
        return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a DTensor, of any other tensor all. (`to_local` makes a view, which cannot be traced, and plans are made while layers are.)"""
    return getattr(tensor, "_local_tensor", tensor)


def fsdp_groups(module: torch.nn.Module) -> tuple[Any, ...] | None:
    """What FSDP2 gathers and frees around this module's calls: groups of parameters. None for a module that `fully_shard` was not called for."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    state = states and states._get_module_fsdp_state(module)
    return None if state is None else _groups_of(state)


def fsdp_groups_behind(hook: Any) -> tuple[Any, ...] | None:
    """The same of the modules that FSDP2 registered a hook for, on what they return. None for anybody else's."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    state = getattr(hook, "__self__", None)
    return _groups_of(state) if states and isinstance(state, states.FSDPState) else None


def _groups_of(state: Any) -> tuple[Any, ...]:
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
    return tuple(group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None)


def cache_folder() -> Path:
    """Where Inductor keeps what it generated."""
    return Path(cache_dir())


def keeps_code() -> bool:
    """Whether Inductor looks there for code that was generated before."""
    return torch._inductor.config.fx_graph_cache and not torch._inductor.config.force_disable_caches


def default_cache_folder() -> Path:
    """The same where nobody says where."""
    return Path(default_cache_dir())


def current_frame() -> int | None:
    """Which function Dynamo compiles now: the same one once more keeps its number. None outside of a compilation."""
    made = CompileContext.current_compile_id()
    return made and made.frame_id


def size_hint(size: int | torch.SymInt) -> int:
    """A size, or of a symbol the size it was compiled for; 0 without one."""
    return size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else 0
