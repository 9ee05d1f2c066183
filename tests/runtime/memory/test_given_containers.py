"""Lists and dictionaries that layers are given and write to, under a budget: they are the caller's."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support.notes import has
from tunecompile.runtime.memory.given_containers import GivenContainers, holds_containers


class Layer(nn.Module):
    def __init__(self, place: int, writes: bool):
        super().__init__()
        self.place, self.writes = place, writes
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, shared, seen):
        keys = self.b(x)
        if self.writes:
            keys = keys + shared["keys"] if self.place else keys
            shared["keys"] = keys
            seen.append(keys)
        else:
            keys = keys + shared["keys"]
        return x + torch.tanh(self.a(x)) * torch.sigmoid(keys)


class Model(nn.Module):
    def __init__(self, writes: bool):
        super().__init__()
        torch.manual_seed(0)
        self.writes, self.embedding, self.head = writes, nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList(Layer(place, writes) for place in range(3))

    def forward(self, ids):
        x = self.embedding(ids)
        shared, seen = {} if self.writes else {"keys": x.mean(0, keepdim=True)}, []
        for layer in self.layers:
            x = layer(x, shared, seen)
        assert len(seen) == (3 if self.writes else 0)
        return self.head(x).square().mean() + sum(each.square().mean() for each in seen)


@pytest.mark.parametrize("writes", [True, False])
def test_what_a_layer_writes_is_read_by_others(writes):
    """Keys for later layers, and terms of a loss: a repeatable call handed over copies, and what they took was lost."""
    model = Model(writes)
    reference = copy.deepcopy(model)
    tunecompile.optimize(model, memory="64MiB", executor="eager")
    for length in (8, 9):
        ids = torch.randint(0, 50, (2, length))
        for each in (model, reference):
            each.zero_grad()
            each(ids).backward()
        for ours, exact in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(ours.grad, exact.grad, rtol=1e-5, atol=1e-7)
    assert has(tunecompile.report(model), "layers-not-repeated", reason="write-in-place") is writes


class Kept(Layer):
    """Keeps its own result for a loss."""

    def forward(self, x, shared, seen):
        self.result = x + torch.tanh(self.a(x)) * torch.sigmoid(self.b(x))
        return self.result


def test_a_result_that_a_layer_keeps_is_its_own():
    """A loss of it goes through the layer's graph: under a budget it was run backward a second time, an error."""
    model = Model(writes=False)
    for layer in model.layers:
        layer.__class__ = Kept
    reference = copy.deepcopy(model)
    tunecompile.optimize(model, memory="64MiB", executor="eager")
    for length in (8, 9):
        ids = torch.randint(0, 50, (2, length))
        for each in (model, reference):
            each.zero_grad()
            (each(ids) + sum(layer.result.square().mean() for layer in each.layers)).backward()
        for ours, exact in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(ours.grad, exact.grad, rtol=1e-5, atol=1e-7)
    assert has(tunecompile.report(model), "layers-not-repeated", reason="expose-tensors")


def test_the_callers_values_come_back():
    """A view was handed over in place of a tensor: where it was left alone, the caller's own stays."""
    tensor, inner, number = torch.ones(2), {"a": 1}, 7
    own = {"t": tensor, "inner": inner, "n": number}
    given = GivenContainers(((own,), {}))
    copied = {"t": tensor.view_as(tensor), "inner": {"a": 1}, "n": number}
    given.hand_over(((copied,), {}))
    assert not given.written
    made = torch.zeros(1)
    copied["inner"]["b"], copied["new"] = made, made
    del copied["n"]
    assert given.written
    given.write_back()
    assert own == {"t": tensor, "inner": inner, "new": made} and own["t"] is tensor and own["inner"] is inner
    assert inner == {"a": 1, "b": made}


def test_lists_are_compared_item_by_item():
    values = [torch.ones(1), torch.ones(1)]
    given = GivenContainers(((), {"seen": values}))
    copied = [*values]
    given.hand_over(((), {"seen": copied}))
    copied[1] = torch.ones(1)
    assert given.written
    given.write_back()
    assert values[1] is copied[1] and len(values) == 2
    given.forget()
    assert not given.written


def test_what_was_not_written_to_is_left_as_it_is():
    """Each container is looked at by itself, those inside others and inside tuples as well."""
    first, last, inner = [1, 2], {"x": 1}, []
    given = GivenContainers(((first, (inner, 5)), {"last": last}))
    copies = [1, 2], [], {"x": 1}
    given.hand_over(((copies[0], (copies[1], 5)), {"last": copies[2]}))
    copies[2]["y"] = copies[1]
    first.append(3)  # by somebody else meanwhile
    assert given.written
    given.write_back()
    assert first == [1, 2, 3] and inner == [] and last == {"x": 1, "y": inner} and last["y"] is inner
    given.forget()
    assert given.own == given.copies == []


def test_calls_without_containers_make_no_copies():
    x = torch.ones(1)
    assert not holds_containers((x, 3, (x, "word")), {"mask": None}) and holds_containers((x, (x, [])), {})
    assert holds_containers((), {"cache": {}}) and not holds_containers((), {})
    given = GivenContainers(((x,), {}))
    given.hand_over(((x, [1]), {}))
    assert given.copies == [] and not given.written
