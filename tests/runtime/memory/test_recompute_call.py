"""Whether a call of a layer can be made again: what the layer wrote to, and what its output has."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tunecompile.errors import LayerChanged, ModifiedInPlace
from tunecompile.notes import note
from tunecompile.runtime.memory.recompute_call import NotExact, RecomputeCall, _flat
from tunecompile.runtime.memory.rng_autocast import RngAutocastState
from tunecompile.runtime.watch.module_watch import ModuleSnapshot


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
    call.sources = [edge(torch.ones(2, requires_grad=True)), *call.sources]
    apart, *others = RecomputeCall._gradients(
        SimpleNamespace(**vars(call) | {"edges": [edge(x * weight)]}), [x.detach()]
    )
    assert apart is None and [each.tolist() for each in others] == [[1.0, 1.0]] * 2
    call.sources, call.weights = [], []
    assert RecomputeCall._gradients(call, [torch.ones(2)]) == []


def test_a_later_call_that_writes_to_a_list_of_the_callers_is_not_made_again():
    """Its first call did not; what it appended is there, and a repetition would append it once more."""
    call = looked_at(lambda layer, x: None)
    call.containers = SimpleNamespace(written=True)
    with pytest.raises(NotExact) as told:
        call.join([torch.ones(3)])
    assert told.value.reason.code == "write-in-place"


class Host:
    """The owner of calls, and what it was told."""

    def __init__(self):
        self.anchor, self.looked, self.calls = torch.empty(0, requires_grad=True), {}, set()
        self.open, self.running, self.bare, self.refused = 0, None, False, {}


def called(layer, *args):
    """A call of this layer, before it ran."""
    slot = SimpleNamespace(
        layer=layer, inside=ModuleSnapshot(layer), region=SimpleNamespace(name="layers"), budget=None
    )
    return RecomputeCall(Host(), slot, RngAutocastState.now(), args, {})


def test_arguments_are_cut_off_in_their_places():
    """Those without a gradient are the caller's own."""
    first, last = (torch.full((2,), float(n), requires_grad=True) for n in (1, 2))
    plain, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    call = called(Counting(), plain, first, {"mask": mask, "x": last}, 7)
    (a, b, given, number), kwargs = call.cut(call.given)
    assert a is plain and given["mask"] is mask and number == 7 and not kwargs
    assert torch.equal(b, first) and torch.equal(given["x"], last) and b.requires_grad and given["x"].requires_grad
    assert b is not first and not b.is_leaf and [edge.node for edge in call.sources] == [b.grad_fn, given["x"].grad_fn]
    (_, b, given, _), _ = call.through()
    assert b._base is first and given["x"]._base is last and given["mask"] is mask


def repeated(change, weights=("weight",), outputs=1):
    """The call, after a layer that trained these weights was changed and ran again."""
    layer, x = Counting(), torch.ones(3, requires_grad=True)
    layer.other = nn.Parameter(torch.ones(3))
    call = called(layer, x)
    edge = torch.autograd.graph.get_gradient_edge
    call.weights = [(edge(getattr(layer, name)), getattr(layer, name)._version) for name in weights]
    call.outputs = outputs
    call.slot.compiled = lambda args, kwargs: [args[0] * layer.weight, 3]
    change(layer, call.slot)
    call._repeat([x])
    return call


def train_more(layer, slot):
    slot.compiled = lambda args, kwargs: [args[0] * layer.weight * layer.other]


def return_more(layer, slot):
    slot.compiled = lambda args, kwargs: [args[0] * layer.weight, layer.weight * 2]


def write_weight(layer, slot):
    with torch.no_grad():
        layer.weight.add_(1.0)


def test_a_repeated_forward_has_the_graph_that_was_dropped():
    (edge,) = repeated(lambda layer, slot: None).edges
    assert edge.node.name() == "MulBackward0"


@pytest.mark.parametrize(
    "change, error, says",
    [
        (train_more, LayerChanged, "other weights of it are trained"),
        (return_more, LayerChanged, "other weights of it are trained"),
        (write_weight, ModifiedInPlace, "version"),
        (lambda layer, slot: layer.eval(), LayerChanged, "training and evaluation"),
        (lambda layer, slot: layer.weight.requires_grad_(False), LayerChanged, "other weights of it are trained"),
    ],
    ids=["train_more", "return_more", "write_weight", "evaluate", "freeze"],
)
def test_a_layer_that_changed_since_is_not_repeated(change, error, says):
    """Its gradients would be those of another forward."""
    with pytest.raises(error, match=says):
        repeated(change)


def first_output(weight_of_input):
    """What a first call returns of x times the layer's weight, with its owner, and the layer's own output."""
    layer = Counting()
    x = torch.ones(3, requires_grad=True) * (layer.weight if weight_of_input else 1.0)
    call = called(layer, x)
    (given,), _ = call.through()
    output = given * layer.weight
    call._weights = lambda: [torch.autograd.graph.get_gradient_edge(layer.weight).node]
    return call.first(output), call.recovery, output


def test_a_layer_whose_weight_an_earlier_one_used_keeps_its_graph():
    """Its gradient would be asked for through the earlier layer, too."""
    returned, host, output = first_output(True)
    assert returned is output and host.open == 1 and not host.calls and not host.refused
    returned, host, output = first_output(False)
    assert returned is not output and torch.equal(returned, output) and host.open == 1 and len(host.calls) == 1
    assert len(host.looked) == 1, "its next call begins without a graph of its own"


def test_a_first_call_that_writes_to_a_buffer_is_the_callers_own():
    """Its layer is not repeated, and nothing stands between the caller's graph and the layer's."""
    layer = Counting()
    call = called(layer, torch.ones(3, requires_grad=True))
    (given,), _ = call.through()
    write_buffer(layer, None)
    output = given * layer.weight
    call._weights = lambda: [torch.autograd.graph.get_gradient_edge(layer.weight).node]
    assert call.first(output) is output and not call.recovery.calls
    assert call.recovery.refused == {id(call.slot): note("write-in-place")}


def test_a_later_call_that_wrote_to_a_buffer_keeps_its_graph():
    """And its layer is not repeated from then on."""
    layer = Counting()
    call = called(layer, torch.ones(3, requires_grad=True))
    (given,), _ = call.cut(call.given)
    call._weights = lambda: [torch.autograd.graph.get_gradient_edge(layer.weight).node]
    write_buffer(layer, None)
    returned = call.join([given * layer.weight])
    assert call.recovery.refused == {id(call.slot): note("write-in-place")} and returned[0].requires_grad
    assert call.drop() is False and call.edges is not None


class Wrapper(torch.Tensor):
    """Some other kind of tensor."""


@pytest.mark.parametrize("hidden", [object(), Wrapper([1.0]), {1}, nn.Linear(1, 1)], ids=lambda h: type(h).__name__)
def test_what_may_hold_tensors_is_no_argument_of_a_call_that_is_repeated(hidden):
    with pytest.raises(NotExact) as told:
        _flat(({"a": [1, hidden]},), "given-object")
    assert told.value.reason.code == "given-object" and type(hidden).__name__ in str(told.value.reason)
    plain = [1, 2.0, "word", None, True, torch.float32, torch.device("cpu"), torch.ones(1), nn.Parameter(torch.ones(1))]
    assert _flat((plain, {"a": ()}), "given-object")[0] == plain


def test_an_output_without_a_gradient_is_nobodys_secret():
    """Whoever holds it cannot go through the layer's graph, so that later calls may be repeated."""
    call = called(Counting(), torch.ones(3, requires_grad=True))
    call.through()
    output = (torch.ones(2), 3)
    call.recovery.looked[0], call.met, kept = {None}, ["a new graph"], [output]
    assert call.first(output) is output is kept[0] and not call.recovery.refused and not call.recovery.calls
    assert call.recovery.open == 0 and call.drop() is True
