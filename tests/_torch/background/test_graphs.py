"""Graphs on their way to another process: kernels of Triton go by their names, values by their shapes."""

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tunecompile._torch.background.graphs import FinalGraph, _restrided, pack, unpack

triton = pytest.importorskip("triton")
layer_norm = pytest.importorskip("tunecompile.templates.layer_norm")


@triton.jit
def outside(x):
    pass


def launching(kernel, mode) -> FinalGraph:
    """A graph that launches a kernel."""
    graph = Graph()
    given = graph.placeholder("given")
    with mode:
        given.meta["val"] = torch.empty(4, device="cpu")
    kernels, constants = kernel_side_table.add_kernel(kernel), kernel_side_table.add_constant_args({"WIDTH": 4})
    told = dict(kernel_idx=kernels, constant_args_idx=constants, grid=[(1, 1, 1)], tma_descriptor_metadata={})
    graph.call_function(triton_kernel_wrapper_mutation, (), {**told, "kwargs": {"x": given}})
    graph.output((given,))
    return FinalGraph(GraphModule({}, graph), [given.meta["val"]], {"is_backward": False})


def sent(graph: FinalGraph, mode):
    with tracing(TracingContext(mode)):
        packed = pack([graph])
    kernel_side_table.reset_table()  # as in another process
    return unpack(packed)


@pytest.fixture
def mode():
    yield FakeTensorMode(shape_env=ShapeEnv())
    kernel_side_table.reset_table()


def kernel_of_ours():
    return next(each for each in vars(layer_norm).values() if isinstance(each, triton.JITFunction))


def test_a_kernel_is_found_by_its_name(mode):
    """Catches numbers of the tables of this process."""
    kernel_side_table.add_kernel(outside)  # another number here than there
    kernel = kernel_of_ours()
    (graph,), *_ = sent(launching(kernel, mode), mode)
    (call,) = graph.gm.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_mutation)
    assert kernel_side_table.get_kernel(call.kwargs["kernel_idx"]) is kernel
    assert kernel_side_table.get_constant_args(call.kwargs["constant_args_idx"]) == {"WIDTH": 4}
    assert f"kernel_idx = {call.kwargs['kernel_idx']}" in graph.gm.code


def test_a_kernel_without_a_name_stays(mode):
    """Catches another kernel of the same name."""
    local = triton.JITFunction(outside.fn)
    with pytest.raises(ValueError, match="cannot be imported"):
        sent(launching(local, mode), mode)


def test_sizes_stay_symbols(mode):
    """Catches code for the sizes of one batch."""
    graph = Graph()
    rows, given = graph.placeholder("rows"), graph.placeholder("given")
    size = mode.shape_env.create_symintnode(mode.shape_env.create_unspecified_symbol(7, ConstantSource("rows")), hint=7)
    with mode:
        rows.meta["val"], given.meta["val"] = size, torch.empty(size, 3, device="cpu")
    graph.output((given,))
    inputs = [size, given.meta["val"]]
    (found,), _, _, made = sent(FinalGraph(GraphModule({}, graph), inputs, {}), mode)
    assert str(found.inputs[1].shape[0]) == str(size)
    assert found.inputs[1].fake_mode is made
    assert found.inputs[0].node.shape_env is made.shape_env


def test_a_backward_is_for_the_strides_that_its_forward_has(mode):
    """Catches code of another key: AOTAutograd gives Inductor these strides, too. None: it is not known, or no tensor."""
    with mode:
        size, saved, other, tangent = (
            7,
            torch.empty(2, 3, device="cpu"),
            torch.empty(4, device="cpu"),
            torch.empty(2, 3),
        )
    found = _restrided([size, saved, other, tangent], [(1, 2), None], sizes=1)
    assert found[1].stride() == (1, 2)
    assert found[0] == size
    assert found[2] is other
    assert found[3] is tangent
