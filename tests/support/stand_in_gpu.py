"""A GPU that is not there: Inductor generates the code of a graph for it, on any machine.

torch is told of it, which its caches remember: a process of its own. Graphs are traced and lowered before, on fake tensors
of a CPU (`as_on_gpu`).
"""

import contextlib
import types
from functools import partial
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tunecompile._torch.generation import code_of_layers
from tunecompile._torch.inductor import _inductor_settings
from tunecompile.ir.pretend_gpu import as_on_gpu

DEVICE = torch.device("cuda:0")
H100 = dict(multi_processor_count=132, major=9, regs_per_multiprocessor=65536, warp_size=32)
H100 |= dict(max_threads_per_multi_processor=2048, max_threads_per_block=1024)
MORE = dict(minor=0, name="H100", total_memory=80 << 30, gcnArchName="", L2_cache_size=50 << 20)


class Generated(BaseException):
    """Ends a compilation with its code."""


@contextlib.contextmanager
def gpu_told():
    """Inside, torch believes in a GPU."""
    known = {name: value for name, value in H100.items() if name in DeviceProperties._fields}
    mine = DeviceProperties(type="cuda", index=0, cc=90, **known)
    seen = types.SimpleNamespace(**H100, **MORE)
    state = torch.zeros(16, dtype=torch.uint8)
    answers = dict(is_available=True, device_count=1, current_device=0, get_device_capability=(9, 0), _lazy_init=None)
    answers |= dict(get_device_properties=seen, synchronize=None, set_device=None, is_initialized=False)
    answers |= dict(get_rng_state=state, set_rng_state=None, memory_allocated=0, get_arch_list=["sm_90"])
    answers |= dict(_exchange_device=0, _maybe_exchange_device=0)
    dynamo = dict(is_available=True, get_compute_capability=90, current_device=0, get_raw_stream=0, synchronize=None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_on_gpu("h100"))
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", new=_always(answer)))
        for name, answer in dynamo.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(_always(answer))))
        worker = CudaInterface.Worker
        stack.enter_context(mock.patch.object(worker, "get_device_properties", staticmethod(_always(seen))))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", classmethod(_always(mine))))
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", new=_always(None)))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", new=_always(True)))
        # fake tensors of a GPU cannot be copied into views, and only what that returns is read
        scatter = "torch._inductor.fx_passes.reinplace._inplace_generalized_scatter"
        stack.enter_context(mock.patch(scatter, new=lambda written, *_: written))
        yield


def _always(answer):
    return lambda *_, **__: answer


def on_gpu(gm):
    """(A copy of a lowered graph on fake tensors of a GPU, its inputs, their mode). Sizes may be symbols."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = next(value.fake_mode for value in values if isinstance(value, torch.Tensor))
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": DEVICE}
        node.args = tuple(DEVICE if isinstance(each, torch.device) else each for each in node.args)
        node.meta = {}
    with mode:
        inputs = [_moved(value) if isinstance(value, torch.Tensor) else value for value in values]
    made = torch.fx.GraphModule(gm, graph)
    FakeTensorProp(made, mode).propagate_dont_convert_inputs(*inputs)
    return made, inputs, mode


def _moved(value):
    return torch.empty_strided(tuple(value.shape), tuple(value.stride()), dtype=value.dtype, device=DEVICE)


def code_of(gm, backward, around=partial(code_of_layers, traced=False)):
    """The code that launches a graph's kernels. around: what is different while it is generated."""
    found = []

    def stop(graph):
        code = graph.codegen()[0]
        found.append(code if isinstance(code, str) else code.value)
        raise Generated

    with gpu_told(), torch.no_grad():
        made, inputs, mode = on_gpu(gm)
        settings = _inductor_settings(inputs, None, None, combine=True)
        settings |= {"post_grad_custom_pre_pass": None, "custom_partitioner_fn": None, "force_disable_caches": True}
        with (
            tracing(TracingContext(mode)),
            config.patch(settings),
            mock.patch.object(GraphLowering, "_compile_to_module", stop),
            around(),
            contextlib.suppress(Generated),
        ):
            compile_fx.compile_fx_inner(made, inputs, is_backward=backward)
    return found[0]
