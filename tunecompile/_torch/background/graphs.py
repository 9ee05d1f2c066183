"""Final graphs on their way to another process, and code for them there.

A forward and its backward go together: the backward's code is for the strides in which the forward's gives what it
saves. That process leaves its code in Inductor's cache on disk, where the training finds it by the same key.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from tunecompile._torch.fake_tensors import size_hint
from tunecompile._torch.lookup import exist, lookup, need, patched

__all__ = ["FinalGraph", "Order", "can_send", "generate", "pack", "unpack"]

_PICKLER = "torch.fx._graph_pickler"
_SHAPES = "torch.fx.experimental.symbolic_shapes.ShapeEnv"
_CONTEXT = "torch._guards.TracingContext"
_metadata = "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta"
_wrap: Any = lookup("torch._higher_order_ops.triton_kernel_wrap")
#: what nodes say of the source, by way of objects that stay in their process
_STAYS = ("nn_module_stack", "source_fn_stack", "from_node", "example_value", "grapharg", "missed", "desc")


def can_send() -> bool:
    """Whether this version of torch has what this needs. (Asked late: torch's compiler takes long to import.)"""
    return (
        exist("GraphPickler", "GraphPickler.dumps", "GraphPickler.loads", "Options", under=_PICKLER)
        and exist(_SHAPES, f"{_CONTEXT}.try_get", f"{_CONTEXT}.fw_metadata", f"{_CONTEXT}.report_output_strides")
        and exist(
            "torch._guards.tracing", "torch._inductor.virtualized.V", "torch._inductor.config.save_config_portable"
        )
        and exist(f"{_metadata}.tensors_saved_for_backwards_slice", f"{_metadata}.num_symints_saved_for_bw")
    )


@dataclass
class FinalGraph:
    """One graph, as Inductor is called with it."""

    gm: GraphModule
    inputs: list
    kwargs: dict[str, Any]
    kernels: dict[int, tuple[str, str]] = field(default_factory=dict)  #: number in torch's table -> where it is
    constants: dict[int, dict] = field(default_factory=dict)  #: number in torch's other table -> constant arguments


@dataclass
class Order:
    """What code depends on beside its graphs."""

    config: dict[str, Any]  #: Inductor's, as it is while the graphs are compiled
    saved: slice  #: the results of the forward that are saved tensors
    sizes: int  #: how many sizes a backward takes before them
    flags: dict[str, Any]  #: of the process
    modules: tuple[str, ...]  #: that register the graphs' ops


def pack(graphs: Sequence[FinalGraph], modules: Sequence[str] = (), *others: Any) -> bytes:
    """All that another process needs to generate code for some graphs. To be called while they are compiled.

    Args:
        graphs: a forward, and its backward if it has one.
        modules: that define ops of these graphs.
        others: what `unpack` gives back besides.

    Raises:
        Exception: of many kinds: something cannot be sent.
    """
    for graph in graphs:
        _name_kernels(graph)
    pickler, options = need(f"{_PICKLER}.GraphPickler"), need(f"{_PICKLER}.Options")
    made: Any = need(f"{_CONTEXT}.try_get")().fw_metadata if len(graphs) > 1 else None
    order = Order(
        need("torch._inductor.config.save_config_portable")(),
        slice(0) if made is None else made.tensors_saved_for_backwards_slice,
        0 if made is None else made.num_symints_saved_for_bw or 0,
        {name: get() for name, (get, _) in _FLAGS.items()},
        (*modules, *_modules(graphs)),
    )
    chosen = options(ops_filter=None, node_metadata_key_filter=lambda key: not key.endswith(_STAYS))
    head = pickler.dumps((order.modules, order.config), chosen)  # to be read before ops are looked up
    body = pickler.dumps((list(graphs), order, others), chosen)
    return len(head).to_bytes(8, "big") + head + body


def unpack(packed: bytes) -> tuple[list[FinalGraph], Order, tuple, Any]:
    """What was packed, and the fake mode of the graphs' values.

    Raises:
        ImportError: a module is not there.
        Exception: of many kinds: this process does not know something.
    """
    loads, mode_of = need(f"{_PICKLER}.GraphPickler").loads, need("torch._subclasses.fake_tensor.FakeTensorMode")
    mode = mode_of(shape_env=need(_SHAPES)())
    end = 8 + int.from_bytes(packed[:8], "big")
    modules, _ = loads(packed[8:end], mode)
    for module in modules:
        importlib.import_module(module)
    graphs, order, others = loads(packed[end:], mode)
    for graph in graphs:
        _enter_kernels(graph)
    return graphs, order, others, mode


def generate(graphs: Sequence[FinalGraph], order: Order, mode: Any, settings: dict, around: Callable) -> None:
    """Have Inductor generate code for the graphs, and write it into its cache.

    Args:
        graphs: unpacked.
        order: unpacked.
        mode: unpacked.
        settings: of Inductor's configuration, what cannot be sent.
        around: returns a context for one compilation.

    Raises:
        Exception: of torch's compiler.
    """
    context, v = lookup("torch._guards.TracingContext")(mode), lookup("torch._inductor.virtualized.V")
    compile_fx_inner = need("torch._inductor.compile_fx.compile_fx_inner")
    for name, (get, put) in _FLAGS.items():
        if get() != order.flags[name]:
            put(order.flags[name])
    _begin_on({each.device for graph in graphs for each in graph.inputs if isinstance(each, torch.Tensor)})
    strides: Any = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(torch._inductor.config, **{**order.config, **settings}))
        stack.enter_context(v.set_fake_mode(mode))
        stack.enter_context(lookup("torch._guards.tracing")(context))
        stack.enter_context(need("torch._dispatch.python.enable_python_dispatcher")())
        stack.enter_context(patched(torch._functorch.config, donated_buffer=False))
        for graph in graphs:
            inputs = graph.inputs if strides is None else _restrided(graph.inputs, strides[order.saved], order.sizes)
            with torch.no_grad(), around(), context.report_output_strides() as strides:
                compile_fx_inner(graph.gm, inputs, **graph.kwargs)


def _begin_on(devices: Collection[torch.device]) -> None:
    """Have contexts on GPUs: Inductor loads kernels, for which a context has to be there."""
    for device in devices:
        if device.type == "cuda":
            torch.empty(1, device=device)


def _restrided(inputs: Sequence[Any], strides: Sequence[Any], sizes: int) -> list[Any]:
    """A backward's inputs, with the saved ones in the forward's strides (`_aot_stage2b_bw_compile` of torch)."""
    made = list(inputs)
    for at, stride in enumerate(strides, sizes):
        if stride is not None and isinstance(made[at], torch.Tensor):
            fixed = tuple(int(each) for each in stride)
            if tuple(map(size_hint, made[at].stride())) != fixed:
                made[at] = made[at].as_strided(made[at].size(), fixed)
    return made


def _name_kernels(graph: FinalGraph) -> None:
    """Tell by names which kernels of Triton are launched: their numbers mean nothing in another process.

    Raises:
        ValueError: one cannot be imported.
    """
    for node in _launches(graph.gm):
        number, constants = _numbers(node)
        graph.kernels[number] = _place(_wrap.kernel_side_table.get_kernel(number))
        graph.constants[constants] = _wrap.kernel_side_table.get_constant_args(constants)


def _enter_kernels(graph: FinalGraph) -> None:
    """Put kernels and constants into the tables of this process."""
    kernels = {old: _wrap.kernel_side_table.add_kernel(_find(*place)) for old, place in graph.kernels.items()}
    constants = {old: _wrap.kernel_side_table.add_constant_args(given) for old, given in graph.constants.items()}
    for node in _launches(graph.gm):
        kernel, given = _numbers(node)
        node.kwargs = {**node.kwargs, "kernel_idx": kernels[kernel], "constant_args_idx": constants[given]}
    if kernels:
        graph.gm.recompile()


def _launches(gm: GraphModule) -> list[torch.fx.Node]:
    modules = [module for module in gm.modules() if isinstance(module, GraphModule)]
    return [node for module in modules for node in module.graph.nodes if "kernel_idx" in node.kwargs]


def _numbers(launch: torch.fx.Node) -> tuple[Any, Any]:
    """Of its kernel and its constant arguments, in torch's tables."""
    return launch.kwargs["kernel_idx"], launch.kwargs["constant_args_idx"]


def _place(kernel: Any) -> tuple[str, str]:
    """Module and name of a kernel.

    Raises:
        ValueError: there is another object, or none.
    """
    function = getattr(kernel, "fn", kernel)
    place = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    try:
        found = _find(*place)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not kernel or place[0] == "__main__":
        raise ValueError(f"the kernel {'.'.join(place)} cannot be imported")
    return place


def _find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _modules(graphs: Sequence[FinalGraph]) -> tuple[str, ...]:
    """Modules that register ops, as far as they are called like the ops' namespaces."""
    calls = (node.target for graph in graphs for node in graph.gm.graph.nodes if node.op == "call_function")
    named = {getattr(call, "namespace", "torch") for call in calls}
    return tuple(sorted(name for name in named if name in sys.modules and name != "torch"))


def _set_deterministic(told: tuple[bool, bool, bool]) -> None:
    torch.use_deterministic_algorithms(told[0], warn_only=told[1])
    torch.utils.deterministic.fill_uninitialized_memory = told[2]  # type: ignore[attr-defined]


def _get_deterministic() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


_MATMUL = torch.backends.cuda.matmul
_PRECISIONS = ("fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def _get_matmul() -> tuple:
    return tuple(getattr(_MATMUL, name) for name in _PRECISIONS)


def _set_matmul(told: tuple) -> None:
    for name, value in zip(_PRECISIONS, told):
        setattr(_MATMUL, name, value)


def _get_folders() -> dict[str, str]:
    return {name: os.environ[name] for name in _FOLDERS if name in os.environ}


_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  #: may be set after the process was started
#: where code is kept, and what its keys depend on: name -> (how to read it, how to set it in the other process)
_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "folders": (_get_folders, os.environ.update),
    "deterministic": (_get_deterministic, _set_deterministic),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul": (_get_matmul, _set_matmul),
    "threads": (torch.get_num_threads, torch.set_num_threads),
}
