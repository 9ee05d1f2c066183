"""Loops over tokens and chunks in models' own code are not unrolled by Dynamo."""

import copy
from collections import OrderedDict, UserDict

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_close
from tests.support.models.token_loops import VOCABULARY, WIDTH, OfTokenLoops, StateSpace, by_tokens
from tests.support.notes import EAGER, find
from tunecompile.integrations.kernel_functions.token_loops import TokenLoops, codes_with_loops, lines_counted


def beside_eager(model: nn.Module, lengths, **options) -> nn.Module:
    """The model optimized, which took a step at each length as the model itself does."""
    ours = tunecompile.optimize(copy.deepcopy(model.train()), executor="eager", **options)
    for length in lengths:
        ids = zoo.batch(VOCABULARY, 2, length)["input_ids"]
        batch = {"ids": ids, "labels": ids}
        expected, made = (zoo.step(each, batch, loss=lambda m, given: m(**given)) for each in (model, ours))
        assert_close(made, expected, loss=1e-6, limit=1e-4, floor=1e-4)
    return ours


@pytest.mark.parametrize("mixer", ["delta rule", "state space"])
def test_layers_that_go_from_token_to_token_run_eagerly(mixer):
    model = beside_eager(OfTokenLoops(mixer), (40, 33))
    assert find(model, *EAGER, reason="loop-over-tokens")
    assert all(region.compiles == 0 for region in tunecompile.report(model).regions)


@pytest.mark.slow
def test_a_loop_over_chunks_is_compiled_for_one_length():
    model = beside_eager(OfTokenLoops("chunks"), (32, 16, 32, 48))
    assert find(model, *EAGER, reason="loop-over-chunks") and find(model, "loop-over-chunks", length=32)
    assert [region.compiles for region in tunecompile.report(model).regions] == [1]


class Heads(nn.Module):
    """Its loop has as many passes as the model has parts, whatever the length; each call draws a random number."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        made = x.new_zeros(x.shape)
        self.calls += 1
        for i in range(len(self.parts)):
            made += nn.functional.dropout(self.parts[i](x), 0.5)
        x += made  # the caller's tensor
        return x


def look(layer: nn.Module, *lengths: int) -> TokenLoops:
    loops = TokenLoops()
    for length in lengths:
        x = torch.ones(2, length, WIDTH)
        loops.refuse(layer, layer, (x,), {}, new=True)
        assert x.eq(1).all()  # a look changes nothing
    return loops


class WritesOnce(nn.Module):
    """Its loop says nothing, and it hands keys on to other layers, who were there before."""

    def forward(self, x, shared, seen):
        for i in range(x.shape[-1] - WIDTH + 2):
            x = x + i
        shared.setdefault("keys", (x.mT,))
        shared["held"][0].add_(1)
        seen.append(x)
        return x


@pytest.mark.parametrize("kind", [dict, UserDict, OrderedDict])
def test_a_look_writes_to_nothing_of_the_callers(kind):
    """A layer that finds keys there would take those of the look, which have no gradient."""
    held = torch.zeros(2)
    shared, seen = kind(held=(held,)), []
    call = (torch.ones(2, 16, WIDTH), shared, seen)
    TokenLoops().refuse(WritesOnce(), WritesOnce(), call, {}, new=True)
    assert list(shared) == ["held"] and shared["held"][0] is held and not held.any() and seen == []
    WritesOnce()(*call)  # as it would
    assert list(shared) == ["held", "keys"] and held.all() and len(seen) == 1


def test_other_loops_are_none_of_tokens():
    layer, before = Heads(), torch.get_rng_state()
    loops = look(layer, 16, 16)
    assert not loops.known  # a second length will tell
    loops = look(layer, 16, 24)
    assert loops.known and loops.over_tokens is None and loops.over_chunks is None
    assert layer.calls == 0 and torch.equal(torch.get_rng_state(), before)


def test_layers_without_loops_are_not_looked_into():
    loops = TokenLoops()
    loops.refuse(nn.Linear(WIDTH, WIDTH), pytest.fail, (torch.ones(2, 16, WIDTH),), {}, new=True)
    assert loops.known and loops.over_tokens is None


def test_where_loops_may_be():
    found = codes_with_loops(StateSpace())
    assert {StateSpace.scan.__code__, by_tokens.__code__} <= found  # it reads its file, not what it calls
    assert StateSpace.__init__.__code__ not in found


class Unbound(nn.Module):
    def forward(self, x):
        state, made = x[:, 0], []
        for token in x.unbind(1):
            state = (state + token).tanh()
            made.append(state)
        return torch.stack(made, 1)


def test_a_loop_over_what_is_taken_apart():
    assert look(Unbound(), 16).over_tokens is not None


def test_lines_are_counted():
    def passes(x):
        for _ in range(x.shape[0]):
            x = x + 1
        return x

    with lines_counted({passes.__code__}) as counts:
        passes(torch.zeros(5))
    first = passes.__code__.co_firstlineno
    assert counts[passes.__code__, first + 2] == 5 and counts[passes.__code__, first + 3] == 1
