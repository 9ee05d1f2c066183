"""Bytes of the code that Inductor generates for a GPU, on a machine without one: who allocates and frees what, and when.

    python -m tests.support.memory.generated MODEL ROWS TOKENS PLAN...    # a line of JSON for each graph of each plan

torch is told of a GPU that is not there, which its caches remember: a process of its own.
"""

import contextlib
import json
import re
import sys
import types
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import tunecompile
from tunecompile._torch.generation.kernel_order import in_order
from tunecompile._torch.inductor import _inductor_settings
from tunecompile.errors import CannotEstimate
from tunecompile.estimate.dry_run_planner import DryRunPlanner
from tunecompile.estimate.known_shapes import shape_config
from tunecompile.estimate.meta_model import _adapted, empty_model
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.planner.candidates import expensive_nodes
from tunecompile.planner.liveness import extent
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan

DEVICE = torch.device("cuda:0")
H100 = dict(multi_processor_count=132, major=9, regs_per_multiprocessor=65536, warp_size=32)
H100 |= dict(max_threads_per_multi_processor=2048, max_threads_per_block=1024)
MORE = dict(minor=0, name="H100", total_memory=80 << 30, gcnArchName="", L2_cache_size=50 << 20)
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1}


#: plans between the extremes, for a joint graph
PLANS = {
    "keep": lambda graph: KEEP,
    "named": lambda graph: Plan(frozenset(range(len(expensive_nodes(graph))))),  # small results stay
    "all": lambda graph: RECOMPUTE,
    "tiles": lambda graph: Plan(None, 4),
    "attention": lambda graph: Plan(None, attention=True),
}


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
        yield


def _always(answer):
    return lambda *_, **__: answer


def on_gpu(gm):
    """(A copy of a lowered graph on fake tensors of a GPU, its inputs, their mode)."""
    mode, graph = FakeTensorMode(allow_non_fake_inputs=True), torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    inputs = []
    for node in graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": DEVICE}
        if node.op == "placeholder":
            value = node.meta["val"]
            with mode:
                inputs.append(
                    torch.empty_strided(tuple(value.shape), tuple(value.stride()), dtype=value.dtype, device=DEVICE)
                )
        node.meta = {}
    made = torch.fx.GraphModule(gm, graph)
    FakeTensorProp(made, mode).propagate_dont_convert_inputs(*inputs)
    return made, inputs, mode


def code_of(gm, backward):
    """The code that launches a graph's kernels."""
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
            in_order(),
            contextlib.suppress(Generated),
        ):
            compile_fx.compile_fx_inner(made, inputs, is_backward=backward)
    return found[0]


MADE = re.compile(r"(\w+) = empty_strided_cuda\((\(.*?\)), (\(.*?\)), torch\.(\w+)\)")
MEMBER = re.compile(r"(\w+) = \w+\[\d+\]$")  # of what a call of ATen returns
CHECKED = re.compile(r"assert_size_stride\((\w+), (\(.*?\)), (\(.*?\))")
ALIAS = re.compile(r"(\w+) = (?:reinterpret_tensor\((\w+),.*\)|(\w+))(?:;|$|  #)")
FREED = re.compile(r"\bdel (\w+(?:, \w+)*)")


def most_bytes(code):
    """The most bytes that generated code holds at once, beside its inputs."""
    owner, readers, sizes, most = {}, {}, {}, 0
    lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]

    def make(name, shape, stride, itemsize):
        owner[name], readers[name], sizes[name] = name, 1, itemsize * _extent(shape, stride)

    for line, following in zip(lines, lines[1:]):
        if found := MADE.match(line):
            make(found[1], found[2], found[3], SIZES[found[4]])
        elif (found := MEMBER.match(line)) and (told := CHECKED.match(following)) and told[1] == found[1]:
            make(found[1], told[2], told[3], 2 if len(_numbers(told[2])) == 4 else 4)  # rows of heads, or their sums
        elif (found := ALIAS.match(line)) and (source := found[2] or found[3]) in owner:
            owner[found[1]] = owner[source]
            readers[owner[source]] += 1
        most = max(most, sum(sizes.values()))
        for freed in FREED.finditer(line):
            for name in freed[1].split(", "):
                if (kept := owner.pop(name, None)) is not None:
                    readers[kept] -= 1
                    if not readers[kept]:
                        del sizes[kept]
        if line.startswith("return ("):
            return most
    raise ValueError("the code does not end")


def _numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def _extent(shape, stride):
    shape, stride = _numbers(shape), _numbers(stride)
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride))


def graphs_of(name, rows, tokens, keys):
    """(Plan, forward, backward) of the first kind of layer of a shape under plans. keys: of `PLANS`."""
    model = empty_model(shape_config(name, 4)).to(torch.bfloat16)
    model.config.use_cache = False
    model, found = _adapted(model, 16, quantised=True).train(), []

    def see(planner, slot, joint):
        if not found:
            found.extend((key, *joint.cut(PLANS[key](joint.graph))) for key in keys)

    with (
        mock.patch.object(DryRunPlanner, "see", see),
        torch.autocast("cpu", dtype=torch.bfloat16),
        contextlib.suppress(CannotEstimate),
    ):
        tunecompile.estimate(model, (rows, tokens), memory="80GiB", gpu="h100")
    return found


def main(name, rows, tokens, *keys):
    for key, *graphs in graphs_of(name, int(rows), int(tokens), keys):
        for graph, backward in zip(graphs, (False, True)):
            line = {"plan": key, "backward": backward, "planned": extent(graph.graph).peak}
            print(json.dumps(line | {"generated": most_bytes(code_of(graph, backward))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
