"""What a model's first layer is given in place of its hidden states, and what its caller sees of it. No model runs."""

import pytest
import torch
from torch import nn

from tunecompile.runtime.layers.force_grad import drop_graph, require_grad, without_view

HIDDEN = (2, 3, 4)


def embedded(**options):
    return torch.arange(24.0).view(HIDDEN).clone().requires_grad_(options.pop("trained", False)).to(**options)


@pytest.mark.parametrize("by_name", [False, True])
def test_hidden_states_require_a_gradient(by_name):
    """The first tensor of more than one dim, in its own memory; others stay themselves."""
    places, mask, hidden = torch.arange(3), torch.ones(2, 3), embedded()
    args, kwargs = ((places,), {"hidden": hidden, "mask": mask}) if by_name else ((places, hidden), {"mask": mask})
    given, named, shared = require_grad(nn.Linear(4, 4), args, kwargs)
    (first, *more), made = (given, named["hidden"]) if by_name else (given, given[1])
    assert first is places and len(more) == (not by_name) and named["mask"] is mask and list(named) == list(kwargs)
    assert made.requires_grad and not hidden.requires_grad and not made._is_view()
    assert made.data_ptr() == hidden.data_ptr() and shared.pairs == ((hidden, made),)
    made.sum().backward()
    assert hidden.grad is None


def frozen():
    return nn.Linear(4, 4).requires_grad_(False)


@pytest.mark.parametrize(
    "layer, args",
    [
        (nn.Linear(4, 4), (embedded(trained=True),)),
        (nn.Linear(4, 4), (embedded(dtype=torch.long),)),
        (nn.Linear(4, 4), ((embedded(), embedded()),)),
        (nn.Linear(4, 4), (torch.ones(3), 2)),
        (frozen(), (embedded(),)),
    ],
    ids=["trained", "numbers", "in a tuple", "no hidden states", "frozen"],
)
def test_where_no_gradient_is_asked_for(layer, args):
    assert require_grad(layer, args, {}) == (args, {}, None)


def test_the_first_layer_of_a_decoder():
    """An encoder's states have a gradient; its own need none, and those of the next layers do."""
    args, _, shared = require_grad(nn.Linear(4, 4), (embedded(), encoded := embedded(trained=True)), {})
    assert args[0].requires_grad and shared.pairs[0][1] is args[0] and args[1] is encoded


class TwoStreams(nn.Linear):
    def forward(self, hidden, encoded, places=None):
        return encoded + hidden if places is None else hidden, encoded


class OneStream(nn.Linear):
    def forward(self, hidden, encoded):
        return self.weight, hidden


@pytest.mark.parametrize("kind, both", [(TwoStreams, True), (OneStream, False)])
@pytest.mark.parametrize("by_name", [False, True])
def test_states_that_layers_hand_on_require_a_gradient_too(kind, both, by_name):
    """They do in every other layer. What layers only read, a text's states under cross-attention, does in none."""
    given = {"hidden": embedded(), "encoded": embedded()}
    args, named, shared = require_grad(kind(4, 4), () if by_name else tuple(given.values()), given if by_name else {})
    states = list(named.values()) if by_name else args
    assert [each.requires_grad for each in states] == [True, both] and len(shared.pairs) == len(
        shared.nodes
    ) == 1 + both


def test_without_gradients_none_is_asked_for():
    with torch.no_grad():
        assert require_grad(nn.Linear(4, 4), args := (embedded(),), {}) == (args, {}, None)


def test_a_layer_that_trains_nothing_gives_what_needs_no_gradient():
    """As in eager code: a loss of it says so. Where a parameter is anywhere behind a result, all results stay."""
    args, _, shared = require_grad(nn.Linear(4, 4), (embedded(),), {})
    (hidden,), weight = args, torch.ones(4, requires_grad=True)
    node = shared.nodes
    plain = {"hidden": (hidden * 2).sin(), "more": (torch.zeros(2), 3)}
    dropped = drop_graph(plain, node)
    assert not dropped["hidden"].requires_grad and torch.equal(dropped["hidden"], plain["hidden"])
    assert dropped["more"] == plain["more"]
    trained = {"hidden": hidden * 2, "more": ((hidden + weight).sin().cos(),)}
    assert drop_graph(trained, node) is trained
    assert drop_graph((), node) == ()


def test_a_view_is_given_as_none_with_its_gradient():
    whole = embedded(trained=True)
    args, _, shared = without_view((whole[:, 1:],), {})
    assert not args[0]._is_view() and args[0].data_ptr() == whole[:, 1:].data_ptr() and shared.pairs[0][1] is args[0]
    (args[0] * 3).sum().backward()
    assert whole.grad.unique_consecutive(dim=1)[0, :, 0].tolist() == [0, 3]
    for same in (whole, embedded(dtype=torch.long)[0], whole.view(24), (whole[0], whole[1])):
        assert without_view((same,), {}) == ((same,), {}, None)
    mask = torch.ones(3)
    (seen, other), _, shared = without_view((whole[0], mask), {})
    assert seen.shape == (3, 4) and other is mask and shared.pairs[0][0].shape == (3, 4)


def test_what_the_layer_writes_is_the_callers():
    hidden, weight = embedded()[0] * 1, torch.ones(4, requires_grad=True)
    args, _, shared = require_grad(nn.Linear(4, 4), (hidden,), {})
    shared.hand_back()
    assert not hidden.requires_grad and hidden._version == 0, "nothing was written"
    args[0].mul_(weight)
    shared.hand_back()
    hidden.sum().backward()
    assert torch.equal(weight.grad, embedded()[0].sum(0))
