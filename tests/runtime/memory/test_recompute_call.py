"""Whether a call of a layer can be made again: what the layer wrote to, and what its output has."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tunecompile.runtime.memory.recompute_call import NotExact, RecomputeCall
from tunecompile.runtime.memory.rng_autocast import RngAutocastState
from tunecompile.runtime.module_watch import ModuleSnapshot


class Counting(nn.Module):
    """Has two buffers and a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.zeros(3))


def write_argument(layer, x):
    x.detach().add_(1.0)


def write_buffer(layer, x):
    layer.second.add_(1.0)


def replace_buffer(layer, x):
    layer.first = torch.zeros(3)


def swap_buffers(layer, x):
    layer.first, layer.second = layer.second, layer.first


def add_buffer(layer, x):
    layer.register_buffer("third", torch.zeros(3))


def drop_buffer(layer, x):
    layer.second = None


def looked_at(change, output=None):
    """The call, after it looked at the output of a layer that made this change."""
    layer, x = Counting(), torch.ones(3, requires_grad=True)
    slot = SimpleNamespace(layer=layer, inside=ModuleSnapshot(layer), region=SimpleNamespace(name="layers"))
    call = RecomputeCall(SimpleNamespace(anchor=x), slot, RngAutocastState.now(), (x,), {})
    asked = []
    call._weights = lambda: asked.append(1) or []
    change(layer, x)
    made = call._look([x * 2, 3, "word"] if output is None else output)
    assert len(asked) == bool(made) and call.outputs == len(call.edges) == len(made)
    return call


def test_a_layer_that_writes_to_nothing_can_be_called_again():
    call = looked_at(lambda layer, x: None)
    assert call.repeatable is True and call.outputs == 1
    call.edges = None
    assert call.drop() is False


@pytest.mark.parametrize(
    "change",
    [write_argument, write_buffer, replace_buffer, swap_buffers, add_buffer, drop_buffer],
    ids=lambda f: f.__name__,
)
def test_a_layer_that_writes_cannot(change):
    """Its graph stays: with what it wrote it would compute other values."""
    call = looked_at(change)
    assert call.repeatable is False and call.drop() is False and call.edges is not None


def test_an_output_without_a_gradient_ends_no_graph():
    assert looked_at(lambda layer, x: None, output=torch.ones(2)).edges == []


def test_a_gradient_that_nobody_gave_reaches_nothing():
    """Each argument and weight has a place among the gradients, reached or not."""
    x, weight = (torch.ones(2, requires_grad=True) for _ in range(2))
    edge = torch.autograd.graph.get_gradient_edge
    call = SimpleNamespace(edges=[edge(x * weight)], sources=[edge(x)], weights=[(edge(weight), 0)])
    assert RecomputeCall._gradients(call, [None]) == [None, None]
    for each, expected in zip(RecomputeCall._gradients(call, [torch.full((2,), 3.0)]), (3.0, 3.0)):
        assert each.tolist() == [expected] * 2
    call.sources, call.weights = [], []
    assert RecomputeCall._gradients(call, [torch.ones(2)]) == []


def test_a_later_call_that_writes_to_a_list_of_the_callers_is_not_made_again():
    """Its first call did not; what it appended is there, and a repetition would append it once more."""
    call = looked_at(lambda layer, x: None)
    call.containers = SimpleNamespace(written=True)
    with pytest.raises(NotExact) as told:
        call.join([torch.ones(3)])
    assert told.value.reason.code == "write-in-place"
