"""What a kernel writes is copied back from other memory, and from its own never."""

import types

import pytest
import torch
from torch._inductor import ir
from torch._inductor.graph import GraphLowering

from tunecompile._torch.generation.written_arguments import nothing_copied_to_itself

SIZE = [1, 4]


def layout(*stride: int) -> ir.FixedLayout:
    return ir.FixedLayout(torch.device("cpu"), torch.float32, SIZE, list(stride))


def buffer(name: str) -> ir.TensorBox:
    return ir.TensorBox.create(ir.InputBuffer(name=name, layout=layout(4, 1)))


def viewed(box: ir.TensorBox) -> ir.TensorBox:
    """The same memory with another stride of the dimension of one, as Inductor gives it to a kernel."""
    return ir.TensorBox(ir.ReinterpretView(data=box.data, layout=layout(8, 1)))


def copies(before: ir.TensorBox, given: ir.TensorBox) -> list:
    """Those after a call that writes its first argument. given: what it was called with instead of `before`."""
    found = []
    graph = types.SimpleNamespace(call_function=lambda target, args, kwargs: found.append(args))
    node, other = types.SimpleNamespace(target=torch.ops.aten.add_.Tensor), buffer("other")
    GraphLowering.propagate_mutation(graph, node, (before, other), {}, (given, other), {})
    return found


def test_nothing_is_copied_to_itself():
    written = buffer("written")
    assert len(copies(written, viewed(written))) == 1  # torch's own way
    with nothing_copied_to_itself():
        assert copies(written, viewed(written)) == []


def test_results_in_other_memory_are_copied_back():
    written, elsewhere = buffer("written"), buffer("elsewhere")
    given = viewed(elsewhere)
    with nothing_copied_to_itself():
        assert copies(written, given) == [(written, given)]


@pytest.mark.parametrize("kind", [dict, list])
def test_arguments_of_kernels_lie_in_dictionaries(kind, monkeypatch):
    """Those of a Triton kernel's launch."""
    seen = []
    monkeypatch.setattr(GraphLowering, "propagate_mutation", lambda *given: seen.append(given[-1]))
    written, elsewhere = buffer("written"), buffer("elsewhere")
    old = {"x": elsewhere, "out": written} if kind is dict else [elsewhere, written]
    view = viewed(written)
    new = {"x": elsewhere, "out": view} if kind is dict else [elsewhere, view]
    with nothing_copied_to_itself():
        GraphLowering.propagate_mutation(None, None, (), {"kwargs": old}, (), {"kwargs": new})
    assert seen == [{"kwargs": old}]
