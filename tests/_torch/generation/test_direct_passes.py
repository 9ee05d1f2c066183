"""Kernels are called on their own arguments where torch's pass would trace the same call."""

import types

import pytest
import torch
from torch._dynamo.repro import after_aot
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from tunecompile._torch.generation.direct_passes import call_in_place, direct_passes
from tunecompile._torch.inductor import triton_kernel_wrap

FUNCTIONAL = triton_kernel_wrap.triton_kernel_wrapper_functional
MUTATION = triton_kernel_wrap.triton_kernel_wrapper_mutation


def launch(clones: tuple[str, ...] = ()) -> tuple[GraphModule, FakeTensorMode]:
    """out = empty; kernel(x, out, SIZE=4), which writes `out`; a result behind it."""
    graph, mode = Graph(), FakeTensorMode()
    with mode:
        value, other, third = (torch.empty(4) for _ in range(3))
    x = graph.placeholder("x")
    out = graph.call_function(torch.ops.aten.empty_like.default, (x,))
    about = dict(kernel_idx=0, constant_args_idx=0, grid=[(4, 1, 1)], tma_descriptor_metadata={})
    about |= dict(kwargs={"x": x, "out": out}, tensors_to_clone=list(clones))
    node = graph.call_function(FUNCTIONAL, kwargs=about)
    node.meta = {"val": {name: value for name in clones}, "stack_trace": "here"}
    result = graph.call_function(torch.ops.aten.neg.default, (out,))
    graph.output((result,))
    for each, known in ((x, value), (out, other), (result, third)):
        each.meta = {"val": known}
    return GraphModule({}, graph), mode


def calls(graph: Graph) -> list[tuple]:
    return [(node.name.split("_default")[0], node.target, node.args, node.kwargs) for node in graph.nodes]


def decomposed(made: tuple[GraphModule, FakeTensorMode], decompose) -> Graph:
    gm, mode = made
    with V.set_fake_mode(mode):
        decompose(gm.graph)
    gm.graph.lint()
    return gm.graph


def test_as_torch_decomposes_it():
    direct, traced = decomposed(launch(), call_in_place), decomposed(launch(), torchs_own())
    assert [str(each) for each in calls(direct)] == [str(each) for each in calls(traced)]
    (node,) = direct.find_nodes(op="call_function", target=MUTATION)
    assert node.meta == {"stack_trace": "here"}


def torchs_own():
    return post_grad.decompose_triton_kernel_wrapper_functional


@pytest.mark.parametrize("clones", [("out",), ("x", "out")])
def test_copies_are_left_to_torch(clones):
    left = decomposed(launch(clones), call_in_place)
    assert left.find_nodes(op="call_function", target=FUNCTIONAL)
    with direct_passes(traced=False):
        both = decomposed(launch(clones), torchs_own())
    traced = decomposed(launch(clones), torchs_own())
    assert [str(each) for each in calls(both)] == [str(each) for each in calls(traced)]


def test_arguments_as_they_were_traced_are_handed_on():
    gm, mode = launch()
    (node,) = gm.graph.find_nodes(op="call_function", target=FUNCTIONAL)
    node.meta["eager_input_vals"] = (), dict(node.kwargs)
    graph = decomposed((gm, mode), call_in_place)
    (call,) = graph.find_nodes(op="call_function", target=MUTATION)
    assert call.meta["eager_input_vals"][1].keys() == call.kwargs.keys()


@pytest.mark.parametrize("traced", [False, True])
def test_scripts_are_written_for_a_trace_alone(monkeypatch, traced):
    written = types.SimpleNamespace(count=0)

    def write(*_, **__):
        written.count += 1

    monkeypatch.setattr(after_aot, "save_graph_repro", write)
    with direct_passes(traced):
        after_aot.save_graph_repro(None, None, (), "inductor", save_dir=None)
    assert written.count == traced and after_aot.save_graph_repro is write
