"""The table of all private names of torch that this package uses.

A name counts as private where torch does not document it: it may move or vanish in any release.
`tunecompile._torch.lookup` finds the objects, and switches features off whose names are gone. Rows of `COMPILING_OFF`
have no substitute: without them `optimize` leaves models eager.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunecompile._torch.known_bugs import installed

CHECKED = ("2.11", "2.13", "2.15")  #: versions of torch that every name of the table was checked on
COMPILING_OFF = "compiling is off, and models stay eager"  #: the fallback of names without a substitute


@dataclass(frozen=True)
class PrivateName:
    """One name: where it is, since when it is used, where it was checked, and what happens without it."""

    name: str  #: dotted. Attributes of instances stand below their class, names in a function's code below the function
    fallback: str  #: what happens where it is gone
    since: str = CHECKED[0]  #: the first version of its package where it is used
    last_checked: tuple[str, ...] = CHECKED  #: versions of its package that it was checked on
    until: str = ""  #: the first version where it is used no more; empty: still used

    @property
    def package(self) -> str:
        """The package that it belongs to, as PyPI calls it."""
        return self.name.partition(".")[0]

    @property
    def required(self) -> bool:
        """Whether nothing is compiled without it."""
        return self.fallback == COMPILING_OFF

    @property
    def used(self) -> bool:
        """Whether it is used with the installed version of its package."""
        version = installed(self.package)
        return version is not None and version >= self.since and not (self.until and version >= self.until)

    def __str__(self) -> str:
        return (
            f"{self.package} {installed(self.package)} has no {self.name} "
            f"(last checked on {self.last_checked[-1]}): {self.fallback}"
        )


def group(fallback: str, *names: str, under: str = "", **versions: Any) -> tuple[PrivateName, ...]:
    """Rows of names that share a fallback. under: a prefix of all of them."""
    return tuple(PrivateName(f"{under}.{name}" if under else name, fallback, **versions) for name in names)


_FSDP = "torch.distributed.fsdp._fully_shard"
_FSDP_OFF = "layers that FSDP2 shards are compiled in parts, with a graph break at each of its hooks"

#: names of FSDP2, which are used together or not at all
FSDP: tuple[PrivateName, ...] = (
    *group(
        _FSDP_OFF,
        *("_fsdp_state._get_module_fsdp_state", "_fsdp_state.FSDPState"),
        *(f"_fsdp_param_group.FSDPParamGroup.{name}" for name in ("fsdp_params", "reduce_grads")),
        "_fsdp_param_group.FSDPParamGroup._reshard_after_forward",
        *(f"_fsdp_param.FSDPParam.{name}" for name in ("sharded_param", "_unsharded_param", "_orig_size")),
        *(
            f"_fsdp_param.FSDPParam.{name}"
            for name in ("param_dtype", "mp_policy", "is_dtensor", "unsharded_accumulated_grad")
        ),
        under=_FSDP,
    ),
    *group(_FSDP_OFF, f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_group", until="2.12"),
    *group(_FSDP_OFF, f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_groups", since="2.13"),
)

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    # Without these no region can be compiled, or it cannot be told when it may run.
    *group(
        COMPILING_OFF,
        "torch.nn.Module._compiled_call_impl",
        "torch.nn.Module._call_impl",
        "torch.nn.Module._forward_pre_hooks",
        "torch.nn.Module._forward_hooks",
        "torch.nn.Module._backward_pre_hooks",
        "torch.nn.Module._backward_hooks",
        "torch._C._current_graph_task_id",
        "torch._dynamo.backends.common.aot_autograd",
        "torch._functorch.aot_autograd.make_boxed_func",
        "torch._functorch.partitioners.min_cut_rematerialization_partition",
        "torch._inductor.compile_fx.compile_fx",
        "torch._inductor.compile_fx.compile_fx_inner",
        "torch._inductor.config.post_grad_custom_pre_pass",
        "torch._inductor.config.custom_partitioner_fn",
        "torch._inductor.custom_graph_pass.CustomGraphPass",
        "torch._inductor.custom_graph_pass.CustomPartitionerFn",
        "torch._inductor.decomposition.select_decomp_table",
        "torch._dispatch.python.enable_python_dispatcher",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "torch.fx.experimental.proxy_tensor.make_fx",
    ),
    # autograd
    *group(
        "calls of layers are not repeated when memory runs out",
        *("OutputType", "ViewAndMutationMeta", "ViewAndMutationMeta.output_info"),
        "ViewAndMutationMeta.num_mutated_inp_runtime_indices",
        under="torch._functorch._aot_autograd.schemas",
    ),
    *group(
        "calls of layers are not repeated when memory runs out",
        "torch._C._autograd._get_sequence_nr",
        "torch._C._FunctionBase._sequence_nr",
    ),
    *group(
        "saved tensors are not offloaded, and batches keep their padding",
        "torch._C._autograd._top_saved_tensors_default_hooks",
    ),
    *group(
        "saved tensors are not offloaded",
        "torch._C._autograd._saved_tensors_hooks_is_enabled",
        "torch.multiprocessing.reductions.StorageWeakRef",
    ),
    *group(
        "the graph of a layer that can be repeated is kept until its outputs die",
        "torch._C._autograd._get_current_graph_task_keep_graph",
    ),
    *group("autocast is switched off by `torch.autocast(enabled=False)`", "torch._C._DisableAutocast"),
    *group(
        "models under transforms of `torch.func` are compiled, which refuse them with an error",
        "torch._C._functorch.peek_interpreter_stack",
    ),
    *group(
        "models under forward-mode differentiation are compiled, which refuses them with an error",
        "torch.autograd.forward_ad._current_level",
    ),
    *group(
        "layers inside torch's checkpoint wrapper are recomputed as a whole, and batches keep their padding there",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper.checkpoint_fn",
    ),
    *group("4-bit linears inside checkpointed functions are not fused", "torch._C._set_grad_enabled"),
    *group(
        "tensor subclasses answer in Python, which costs host time",
        "torch._C.DisableTorchFunction",
        "torch._C.DisableTorchFunctionSubclass",
    ),
    *group(
        "AOTAutograd donates no buffers to a backward graph",
        "torch._guards.TracingContext.try_get",
        "torch._guards.TracingContext.fw_metadata",
        "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs",
    ),
    # CUDA
    *group("segments of the CUDA allocator do not grow", "torch._C._accelerator_setAllocatorSettings"),
    *group(
        "settings of the allocator that were made in Python are overwritten",
        "torch._C._accelerator_getAllocatorSettings",
        since="2.13",
    ),
    *group("kernels of attention are timed with the time of their launches", "torch.cuda._sleep"),
    # distributed
    *group(
        "under DDP layers are cut where its buckets end, and patterns that cross a cut are not found",
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
    ),
    *group(
        "ranks do not tell each other of memory that ran out, nor of verification",
        "torch.distributed.distributed_c10d._get_default_store",
    ),
    *group("sharded parameters count with their whole size in plans", "torch.distributed.tensor.DTensor._local_tensor"),
    *FSDP,
    *group(
        "a layer that FSDP2 shards sends its gradients late, where it was called again",
        *("_fsdp_state.FSDPState._training_state", "_fsdp_param_group.FSDPParamGroup._training_state"),
        under=_FSDP,
    ),
    # Dynamo
    *group(
        "a compiled call fails while another thread compiles",
        "torch._dynamo.convert_frame.compile_lock",
    ),
    *group(  # of the process; from 2.15 on there is a flag for each thread, and no call is refused
        "a compiled call fails while another thread compiles",
        "torch.fx._symbolic_trace._is_fx_tracing_flag",
        until="2.15",
    ),
    *group(
        "numbers that differ between layers stay symbols, and patterns with them are not found",
        "torch._dynamo.exc.TensorifyScalarRestartAnalysis",
        "torch._dynamo.symbolic_convert.TensorifyState.clear",
        "torch._dynamo.symbolic_convert.TensorifyState.should_specialize",
        "torch._dynamo.symbolic_convert.TensorifyState.specialize",
        "torch.fx.experimental.sym_node.SymNode._expr",
    ),
    *group(
        "an op that refuses fake tensors ends the step, instead of leaving its layer eager",
        "torch._dynamo.exc.TorchRuntimeError",
    ),
    *group(
        "the report does not give the reasons of recompilations",
        "torch._dynamo.utils.get_metrics_context",
        "torch._dynamo.metrics_context.MetricsContext._metrics",
    ),
    *group(
        "graphs of models that were dropped stay until `torch.compiler.reset()`",
        "torch._C._dynamo.eval_frame.reset_code",
    ),
    *group("layers run eagerly while another thread compiles", "torch._guards.CompileContext.try_get"),
    *group(
        "the report shows the last graph alone of a layer with graph breaks",
        "torch._guards.CompileContext.current_compile_id",
        "torch._guards.CompileId.frame_id",
    ),
    *group(
        "the report does not tell when Dynamo's limit of graphs is reached",
        "torch._dynamo.eval_frame._debug_get_cache_entry_list",
        "torch._dynamo.config.recompile_limit",
    ),
    *group(
        "under DDP layers are cut where its buckets end, and patterns that cross a cut are not found",
        "torch._dynamo.config.optimize_ddp",
    ),
    *group(
        "batches keep their padding",
        *("symbolic_convert.InstructionTranslator", "symbolic_convert.InstructionTranslator.current_tx"),
        *("side_effects.SideEffects.id_to_variable", "side_effects.SideEffects.is_modified"),
        *("side_effects.SideEffects.store_attr_mutations", "variables.tensor.TensorVariable"),
        *("variables.base.VariableTracker", "variables.base.VariableTracker.visit"),
        *("variables.base.ValueMutationExisting", "variables.base.AttributeMutationExisting"),
        under="torch._dynamo",
    ),
    *group(
        "under DDP each call sets Dynamo's configuration by its slower public function",
        "torch._dynamo.config._make_closure_patcher",
    ),
    *group(
        "on torch before 2.12 a process that trains several models may crash",
        "torch._dynamo.config.use_recursive_dict_tags_for_guards",
        until="2.12",
    ),
    *group(
        "layers with an integer of their own each are compiled one by one, up to Dynamo's limit",
        "torch._dynamo.config.allow_unspec_int_on_nn_module",
    ),
    *group(
        "estimates are traced with symbols, which takes longer",
        "torch._dynamo.config.automatic_dynamic_shapes",
        "torch._dynamo.config.assume_static_by_default",
    ),
    *group("every batch size and length is compiled anew", "torch._dynamo.maybe_mark_dynamic"),
    *group(
        "a trace has no bound in seconds",
        "torch._dynamo.callback.callback_handler.start_callbacks",
        "torch._dynamo.callback.callback_handler.end_callbacks",
    ),
    *group(
        "sizes are marked as dynamic in every step, which costs host time",
        "torch._dynamo.decorators.maybe_mark_dynamic._dynamo_weak_dynamic_indices",
    ),
    # fake tensors
    *group(
        "shape rules of ops run for each call anew, which makes compiling slower",
        "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols",
    ),
    *group(
        "batches keep their padding",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ),
    *group(
        "layers with weights of a tensor subclass are compiled without rewrites",
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    ),
    *group(
        "kernels of templates start through torch's wrapper, which costs host time",
        "torch.utils._python_dispatch._get_current_dispatch_mode",
    ),
    *group(
        "masks of long rows are made, though layers do not read them",
        "torch.overrides._get_current_function_mode",
    ),
    # AOTAutograd and Inductor
    *group(
        "what a Triton kernel writes is analysed at every use, which makes compiling slower",
        "torch._higher_order_ops.triton_kernel_wrap",
    ),
    *group(
        "layers are not recorded as CUDA graphs, and weights are not cached in the layout that products read",
        *("CompiledFxGraph", "CompiledFxGraph.current_callable", "CompiledFxGraph.mutated_input_idxs"),
        under="torch._inductor.output_code",
    ),
    *group(
        "the backward pass is compiled when it first runs, where a failure ends the step",
        "torch._functorch.config.force_non_lazy_backward_lowering",
    ),
    *group(
        "code that is recorded as CUDA graphs may come from a cache", "torch._functorch.config.enable_autograd_cache"
    ),
    *group("AOTAutograd's own choice of donated buffers holds", "torch._functorch.config.donated_buffer"),
    *group("small kernels are not joined", "torch._inductor.config.combo_kernels"),
    *group("gradients of rotated heads are in two kernels", "torch._inductor.config.realize_reads_threshold"),
    *group(
        "code for changing sizes may be generated again though a cache has it",
        "torch._inductor.codecache.extract_tensor_metadata_for_cache_key",
    ),
    *group(
        "Inductor joins kernels far from each other, which takes more memory than is planned",
        *("ForeachKernelSchedulerNode", "ForeachKernelSchedulerNode.group_nodes_for_combo_kernels"),
        *("ForeachKernelSchedulerNode.combinable_nodes", "BaseSchedulerNode.get_write_buffer_sizes"),
        *("BaseSchedulerNode.min_order", "BaseSchedulerNode.max_order"),
        *("Scheduler", "Scheduler.nodes", "Scheduler._get_unmet_dep_nodes", "Scheduler.are_long_distant_nodes"),
        under="torch._inductor.scheduler",
    ),
    *group(
        "Inductor orders kernels anew, which may take more memory than is planned",
        *("torch._inductor.memory", "torch._inductor.memory.reorder_for_peak_memory"),
        "torch._inductor.memory.reorder_for_peak_memory.methods",
    ),
    *group(
        "some graphs for changing sizes are compiled without rewrites, where a template writes rows of one part",
        *("graph.GraphLowering", "graph.GraphLowering.propagate_mutation", "ir.IRNode.maybe_get_name"),
        under="torch._inductor",
    ),
    *group(
        "generating code takes longer",
        *("_inductor.fx_passes.post_grad", "_dynamo.repro.after_aot", "_dynamo.repro.after_aot.save_graph_repro"),
        "_inductor.fx_passes.post_grad.decompose_triton_kernel_wrapper_functional",
        "_inductor.fx_passes.post_grad.FakeTensorUpdater",
        "_inductor.fx_passes.post_grad.FakeTensorUpdater.processed_hashes",
        "_inductor.fx_passes.post_grad.FakeTensorUpdater.hash_node",
        "_inductor.fx_passes.post_grad.FakeTensorUpdater.incremental_update",
        under="torch",
    ),
    *group(
        "Python's cycle collector runs once more for each compiled kind of layers",
        "torch._dynamo.config.run_gc_after_compile",
    ),
    *group("layers that fail with joined kernels are compiled without rewrites", "torch._inductor.exc.InductorError"),
    *group("mix-order reduction is as torch has it", "torch._inductor.config.triton.mix_order_reduction"),
    *group("some graphs for changing sizes are compiled again", "torch._inductor.config.shape_padding"),
    *group(
        "Triton's default says whether products in templates are fused into sums",
        "PythonWrapperCodegen",
        *("PythonWrapperCodegen.define_user_defined_triton_kernel", "PythonWrapperCodegen.define_kernel"),
        under="torch._inductor.codegen.wrapper",
    ),
    *group(
        "kernels of templates start through launchers in C, each of which is compiled",
        "torch._inductor.config.static_launch_user_defined_triton_kernels",
    ),
    *group(
        "ranks compile at the same time, instead of one for all",
        "torch._inductor.config.fx_graph_cache",
        "torch._inductor.config.force_disable_caches",
    ),
    *group(
        "compile workers start with the first compilation, which waits for them",
        "torch._inductor.async_compile.maybe_warm_pool",
    ),
    *group(
        "until compile workers are there, one kernel is compiled after the other",
        *("AsyncCompile._ready_future", "AsyncCompile.process_pool"),
        under="torch._inductor.async_compile",
    ),
    *group(
        "a kernel's configurations are timed 100 times each in the first step",
        *("triton_heuristics", "triton_heuristics.benchmarker"),
        under="torch._inductor.runtime",
    ),
    *group(
        "a first layer waits until cuDNN has loaded its attention",
        "torch.ops.aten._scaled_dot_product_cudnn_attention",
    ),
    *group(
        "kernels of a forward are awaited before code for its backward is generated",
        *("async_compile.AsyncCompile", "async_compile.AsyncCompile.wait"),
        *("codecache.FxGraphCache", "codecache.FxGraphCache._save_graph"),
        *("triton_bundler.TritonBundler", "triton_bundler.TritonBundler.begin_compile"),
        *("triton_bundler.TritonBundler.collect", "triton_bundler.TritonBundler.end_compile"),
        "output_code.CompiledFxGraph.set_triton_bundle",
        under="torch._inductor",
    ),
    *group(
        "caches are where TORCHINDUCTOR_CACHE_DIR says, or in the folder for temporary files",
        "torch._inductor.runtime.cache_dir_utils.cache_dir",
        "torch._inductor.runtime.cache_dir_utils.default_cache_dir",
    ),
    *group(
        "torch's structured trace (TORCH_TRACE) does not show graphs between passes",
        *("LazyTraceHandler", "trace_log", "trace_structured"),
        under="torch._logging._internal",
    ),
    *group(
        "tensors that Inductor lowers are not told apart from other arguments, which makes compiling slower",
        "torch._inductor.ir.TensorBox",
    ),
    *group(
        "`explain` does not connect new operations to those that they replace", "torch.fx.GraphModule._set_replace_hook"
    ),
    # torch.nn
    *group("`verify` raises ImportError", "torch.nn.utils.stateless._reparametrize_module"),
    *group("DeepSpeed's replacement of linear is used where linears are recognised", "torch._C._nn.linear"),
    *group(
        "hooks for all modules that come after the first step are not seen inside layers",
        *("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"),
        "_has_any_global_hook",
        under="torch.nn.modules.module",
    ),
)
