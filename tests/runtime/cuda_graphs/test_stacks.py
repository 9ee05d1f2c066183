"""Layers that are replayed together give what they give one by one, whoever looks in between."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.memory.cpu_recorder import CpuRecorder
from tests.support.models.pairs import attending
from tests.support.notes import has
from tests.support.stacks import layers_of, of, once, recorded, same, warm
from tunecompile.runtime.cuda_graphs import launch_bound
from tunecompile.runtime.cuda_graphs.between import Between
from tunecompile.runtime.cuda_graphs.chain import Call, Chain, Link
from tunecompile.runtime.cuda_graphs.recorded_chains import MAX_FLIGHTS, RecordedChains
from tunecompile.runtime.cuda_graphs.recording import InputBuffers
from tunecompile.runtime.cuda_graphs.stack_pass import Flight
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.model_state import state_of

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_all_layers_are_one_recording(stack, replayed):
    warm(stack)
    assert recorded(stack[0]) == 1 and state_of(stack[0]).replays.recorded == 0
    assert set(replayed) == {4} and has(stack[0], "stacks-replayed", count=1)
    before = len(replayed)
    for seed in range(3):
        same(stack, lambda m: once(m, seed=seed))
    assert len(replayed) == before + 3 and not of(stack[0]).broken


@pytest.mark.parametrize("forwards, flights", [(2, 2), (6, MAX_FLIGHTS)])
def test_several_forwards_before_one_backward(stack, replayed, forwards, flights):
    """Each has memory of its own, up to some; further ones run layer by layer."""
    warm(stack)
    before = len(replayed)

    def all_of_them(m):
        losses = [m(**zoo.batch(seed=seed)).loss for seed in range(forwards)]
        sum(loss * (1 + place) for place, loss in enumerate(losses)).backward()

    for _ in range(3):
        same(stack, all_of_them)
    assert len(replayed) == before + 3 * flights and recorded(stack[0]) == flights
    (chain,) = of(stack[0]).chains.values()
    assert len({made.pool for flight in chain.flights for made in flight.recordings.values()}) == flights
    same(stack)
    assert recorded(stack[0]) == flights


def test_memory_of_a_pending_backward_is_left_alone(stack):
    """What is recorded anew before it comes is recorded elsewhere."""
    warm(stack)
    (chain,) = of(stack[0]).chains.values()
    kept, (before,) = [m(**zoo.batch(seed=1)).loss for m in stack], [flight.pool for flight in chain.flights]
    of(stack[0]).drop(chain)
    for seed in range(3):
        same(stack, lambda m: once(m, seed=seed))
    (anew,) = {made.pool for flight in chain.flights for made in flight.recordings.values()}
    assert anew != before
    losses = iter(kept)
    same(stack, lambda m: next(losses).backward())


def test_rows_without_padding_whose_lengths_change(on_cpu, monkeypatch):
    """They are filled up to sizes that were recorded; a layer is given no result of the one before it then."""
    monkeypatch.setattr(launch_bound.Clock, "decide", lambda self: True)
    reference = zoo.adapt(attending(num_hidden_layers=3), target_modules=["q_proj"]).train()
    pair = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference
    for seed in range(10):
        same(pair, lambda m: once(m, seed=seed, length=(12, 24)[seed % 2]))
    assert recorded(pair[0]) == 2 and not of(pair[0]).broken and has(pair[0], "sizes-rounded", count=5)


def test_backwards_in_another_order(stack):
    warm(stack)

    def crossed(m):
        first, second = m(**zoo.batch(seed=1)).loss, m(**zoo.batch(seed=2)).loss
        first.backward()
        third = m(**zoo.batch(seed=3)).loss
        second.backward()
        third.backward()

    for _ in range(2):
        same(stack, crossed)


@pytest.mark.parametrize("place", [0, 2])
def test_a_hook_that_looks(stack, replayed, place):
    """It reads what the layer gives, and layers behind it may read what it returns."""
    warm(stack)
    before, seen = len(replayed), []

    def look(module, args, output):
        seen.append(output.detach().clone())

    hooks = [layers_of(m)[place].register_forward_hook(look) for m in stack]
    for seed in range(3):
        same(stack, lambda m: once(m, seed=seed))
    for ours, theirs in zip(seen[::2], seen[1::2]):
        torch.testing.assert_close(ours, theirs)
    for hook in hooks:
        hook.remove()
    same(stack)
    assert len(replayed) > before


def test_a_hook_that_changes_what_it_sees(stack):
    warm(stack)
    for m in stack:
        layers_of(m)[1].register_forward_hook(lambda module, args, output: output * 1.5)
    for seed in range(5):
        same(stack, lambda m: once(m, seed=seed))


def test_results_that_are_kept_have_the_weights_of_their_pass(stack, monkeypatch):
    """Read after the optimizer's step, they are as eager code gives them. (The owner's code keeps them: no hook tells.)"""
    warm(stack)
    kept, inner = [], LayerSlot.__call__

    def call(self, *args, **kwargs):
        output = inner(self, *args, **kwargs)
        kept.extend([output] if self.place == 2 else [])
        return output

    monkeypatch.setattr(LayerSlot, "__call__", call)
    once(stack[0], seed=3)
    layers_of(stack[1])[2].register_forward_hook(lambda module, args, output: kept.append(output))
    once(stack[1], seed=3)
    for m in stack:
        with torch.no_grad():
            for p in m.parameters():
                p.add_(0.1)
    assert isinstance(kept[0], Between)
    torch.testing.assert_close(kept[0] + 0, kept[1])


def test_layers_that_are_left_out(stack):
    """A model may call fewer of them, or in another order."""
    warm(stack)
    for keep in ([0, 1], [0, 2, 3], [1, 0, 2, 3], [0, 1, 2, 3]):
        for m in stack:
            owner, layers = m.base_model.model.model, layers_of(m)
            vars(m)["all"] = vars(m).get("all", layers)
            owner.layers = torch.nn.ModuleList([m.all[at] for at in keep])
        for seed in range(4):
            same(stack, lambda m: once(m, seed=seed))


def test_weights_that_are_frozen_move_or_are_exchanged(stack, replayed):
    warm(stack)
    for m in stack:
        for name, p in layers_of(m)[2].named_parameters():
            p.requires_grad_(p.requires_grad and "lora_A" not in name)
    for seed in range(6):
        same(stack, lambda m: once(m, seed=seed))
    for m in stack:
        for p in m.parameters():
            p.data = p.data.clone() * 1.25
    for seed in range(6):
        same(stack, lambda m: once(m, seed=seed))
    before = len(replayed)
    for m in stack:
        inner = layers_of(m)[1].inner
        inner.scaling["default"] *= 2
    for seed in range(6):
        same(stack, lambda m: once(m, seed=seed))
    assert len(replayed) > before, "recorded anew"


@pytest.mark.parametrize(
    "saved, total, asked, released",
    [(15, 10_000, 0, False), (25, 10_000, 50, False), (25, 1_000, 50, True), (60, 100, 120, False)],
)
def test_a_larger_shape_has_blocks_of_its_own_where_there_is_room(saved, total, asked, released):
    """Those of smaller shapes cannot be joined: they are given back first where memory is not plenty."""
    requests, releases = [], []
    recorder = SimpleNamespace(memory=lambda device: (0, total), release=lambda: releases.append(True))
    shared = SimpleNamespace(recorder=recorder, bytes=100, buffers=InputBuffers())
    shared.room = lambda inputs, needed, layers: requests.append(needed) is None
    flight = Flight(bytes=100, largest=40)
    assert RecordedChains(shared)._room(flight, SimpleNamespace(saved=saved), 2, [torch.ones(1)])
    assert (requests, bool(releases), shared.bytes) == ([asked], released, 0 if released else 100)


def test_memory_that_is_given_back(stack):
    warm(stack)
    model, _ = stack
    assert state_of(model).replays.bytes > 0
    kept = [m(**zoo.batch(seed=3)).loss for m in stack]
    tunecompile.free(model)
    assert state_of(model).replays.bytes == 0
    losses = iter(kept)
    same(stack, lambda m: next(losses).backward())
    warm(stack)
    assert recorded(model) == 2


def test_a_stack_that_cannot_be_recorded(stack, monkeypatch):
    """Its layers are recorded one by one."""
    tries, plain = [], CpuRecorder.record

    def record(self, run, pool, device):
        tries.append(pool)
        if len(tries) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(self, run, pool, device)

    monkeypatch.setattr(CpuRecorder, "record", record)
    warm(stack)
    assert has(stack[0], "no-stack-recorded", detail="not permitted") and recorded(stack[0]) == 0
    assert state_of(stack[0]).replays.recorded == 8


def forward(m, seed, length):
    return m(**zoo.batch(seed=seed, length=length)).loss


def accumulates(m, seed, length):
    for each in (seed, seed + 1):
        forward(m, each, length).backward()


def sums(m, seed, length):
    (forward(m, seed, length) + 2 * forward(m, seed + 1, length)).backward()


def runs_a_backward_twice(m, seed, length):
    loss = forward(m, seed, length)
    loss.backward(retain_graph=True)
    forward(m, seed + 1, length).backward()
    loss.backward()


def trains(m, seed, length):
    forward(m, seed, length).backward()
    with torch.no_grad():
        for p in m.parameters():
            p -= 0 if p.grad is None else 0.01 * p.grad


def test_random_loops(stack, replayed):
    """Acts in any order. `held` are forwards whose backward comes later, or never."""
    rng, held = random.Random(0), []
    acts = {
        accumulates: 1,
        sums: 1,
        runs_a_backward_twice: 1,
        trains: 3,
        "hold": 1,
        "finish": 1,
        "score": 1,
        "free": 0.3,
    }
    for at in range(60):
        (act,), length = rng.choices([*acts], acts.values()), rng.choice([16, 16, 12])
        if act == "hold":
            held = [forward(m, at, length) for m in stack]
        elif act == "finish" and held:
            losses, held = iter(held), []
            same(stack, lambda m: next(losses).backward())
        elif act == "score":
            with torch.no_grad():
                torch.testing.assert_close(*(forward(m.eval(), at, length) for m in stack))
            for m in stack:
                m.train()
        elif act == "free":
            tunecompile.free(stack[0])
        elif callable(act):
            held = [] if act is trains else held  # what is held needs the weights of its pass
            same(stack, lambda m: act(m, at, length))
    assert len(replayed) > 20


def test_numbers_that_were_equal_by_chance():
    """Of two sizes that were equal in all passes, one was taken for the other: the next pass tells."""
    chain = Chain([])
    link, tensors = Link(lambda *inputs: [inputs[0]], lambda link, inputs: None), torch.ones(2).split(1)
    for sizes in ((3, 3), (3, 3)):
        calls = [Call.first(link, [tensors[0], *sizes]), Call.after(link, [tensors[1], 3], [tensors[0], *sizes], None)]
        chain = chain if chain.calls else Chain(calls)
        assert not chain.learn(calls)
    first = [tensors[0], 3, 5]
    assert not chain.calls[1].takes(link, [tensors[1], 5], first, None)
    assert chain.narrow(1, link, [tensors[1], 5], first, None)
    assert chain.calls[1].takes(link, [tensors[1], 5], first, None)
    assert not chain.narrow(1, link, [tensors[1], 7], first, None)
