"""Layers that are replayed together give what they give one by one, whoever looks in between.

On a CPU a recorder stands in that does again, in place, what it was given: all but the device's own part is the real
thing.
"""

import copy
import random
from types import SimpleNamespace

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.memory.cpu_recorder import CpuRecorder
from tests.support.models.pairs import of_plain_layers
from tests.support.notes import has
from tunecompile.runtime.cuda_graphs import launch_bound, replay, stacks
from tunecompile.runtime.cuda_graphs.chain import Call, Chain, Link
from tunecompile.runtime.layers.between import Between
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.model_state import state_of

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=[0, 2, 3])
def pair(request, monkeypatch):
    """(optimized with a recorder for CPUs, as it was). A pass is replayed at its first call, or waits for inputs that a
    later one might bring.
    """
    take = Chain._take

    def take_and_wait(self, calls):
        take(self, calls)
        self.ready = max(self.ready, min(request.param, len(calls) - 1))

    monkeypatch.setattr(Chain, "_take", take_and_wait)
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)
    reference = zoo.adapt(of_plain_layers(num_hidden_layers=4), target_modules=["inner"]).train()
    return tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference


def layers_of(model):
    return next(module for name, module in model.named_modules() if name.endswith("layers"))


def once(m, **batch):
    m(**zoo.batch(**batch)).loss.backward()


def gradients(model) -> dict:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(models, run=once) -> None:
    found = []
    for m in models:
        m.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        run(m)
        found.append(gradients(m))
    assert found[0].keys() == found[1].keys() and max(zoo.errors(*found).values()) < 1e-4


def of(model):
    return state_of(model).replays.stacks


def recorded(model) -> int:
    return of(model).recorded


def warm(models, steps=6, **batch) -> None:
    for seed in range(steps):
        same(models, lambda m: once(m, seed=seed, **batch))


@pytest.fixture
def replayed(monkeypatch):
    """The passes that were replayed, by the number of their layers."""
    found, replay_of = [], stacks.Stacks._replay

    def watched(self, chain, inputs):
        output = replay_of(self, chain, inputs)
        found.extend([len(chain.calls)] if output is not None else [])
        return output

    monkeypatch.setattr(stacks.Stacks, "_replay", watched)
    return found


def test_all_layers_are_one_recording(pair, replayed):
    warm(pair)
    assert recorded(pair[0]) == 1 and state_of(pair[0]).replays.recorded == 0
    assert set(replayed) == {4} and has(pair[0], "stacks-replayed", count=1)
    before = len(replayed)
    for seed in range(3):
        same(pair, lambda m: once(m, seed=seed))
    assert len(replayed) == before + 3 and not of(pair[0]).broken


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_sizes_and_padding_change(monkeypatch, replayed, family):
    """Padded batches run as rows without padding, whose sizes are rounded: each is recorded once."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)
    reference = zoo.adapt(zoo.make(family, num_hidden_layers=3)).train()
    models = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference
    for seed, length in enumerate([16, 12, 16, 12, 9, 16, 12, 9, 16, 12]):
        batch = zoo.batch(seed=seed, length=length)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if seed % 3:
            batch["attention_mask"][0, length - 3 :] = 0
            batch["labels"][0, length - 3 :] = -100
        same(models, lambda m: m(**batch).loss.backward())
    assert recorded(models[0]) >= 2 and set(replayed) == {3} and not of(models[0]).broken


def test_accumulated_gradients(pair):
    warm(pair)
    same(pair, lambda m: [once(m, seed=seed) for seed in range(3)])


def test_two_forwards_before_one_backward(pair, replayed):
    """What the first has saved is still needed: the second runs layer by layer."""
    warm(pair)
    before = len(replayed)

    def both(m):
        first, second = m(**zoo.batch(seed=1)).loss, m(**zoo.batch(seed=2)).loss
        (first + 2 * second).backward()

    same(pair, both)
    assert len(replayed) == before + 1
    same(pair)


def test_a_backward_that_runs_twice(pair):
    warm(pair)

    def twice(m):
        loss = m(**zoo.batch(seed=1)).loss
        loss.backward(retain_graph=True)
        m(**zoo.batch(seed=2)).loss.backward()
        loss.backward()

    same(pair, twice)


def test_a_forward_without_a_backward(pair):
    warm(pair)
    kept = [m(**zoo.batch(seed=3)).loss for m in pair]
    same(pair, lambda m: once(m, seed=4))
    losses = iter(kept)
    same(pair, lambda m: next(losses).backward())


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_hook_that_looks(pair, replayed, place):
    """It reads what the layer gives, and layers behind it may read what it returns."""
    warm(pair)
    before, seen = len(replayed), []

    def look(module, args, output):
        seen.append(output.detach().clone())

    hooks = [layers_of(m)[place].register_forward_hook(look) for m in pair]
    for seed in range(3):
        same(pair, lambda m: once(m, seed=seed))
    for ours, theirs in zip(seen[::2], seen[1::2]):
        torch.testing.assert_close(ours, theirs)
    for hook in hooks:
        hook.remove()
    same(pair)
    assert len(replayed) > before


def test_a_hook_that_changes_what_it_sees(pair):
    warm(pair)
    for m in pair:
        layers_of(m)[1].register_forward_hook(lambda module, args, output: output * 1.5)
    for seed in range(5):
        same(pair, lambda m: once(m, seed=seed))


def test_results_that_are_kept_have_the_weights_of_their_pass(pair, monkeypatch):
    """Read after the optimizer's step, they are as eager code gives them. (The owner's code keeps them: no hook tells.)"""
    warm(pair)
    kept, inner = [], LayerSlot.__call__

    def call(self, *args, **kwargs):
        output = inner(self, *args, **kwargs)
        kept.extend([output] if self.place == 2 else [])
        return output

    monkeypatch.setattr(LayerSlot, "__call__", call)
    once(pair[0], seed=3)
    layers_of(pair[1])[2].register_forward_hook(lambda module, args, output: kept.append(output))
    once(pair[1], seed=3)
    for m in pair:
        with torch.no_grad():
            for p in m.parameters():
                p.add_(0.1)
    assert isinstance(kept[0], Between)
    torch.testing.assert_close(kept[0] + 0, kept[1])


def test_layers_that_are_left_out(pair):
    """A model may call fewer of them, or in another order."""
    warm(pair)
    for keep in ([0, 1], [0, 2, 3], [1, 0, 2, 3], [0, 1, 2, 3]):
        for m in pair:
            owner, layers = m.base_model.model.model, layers_of(m)
            vars(m)["all"] = vars(m).get("all", layers)
            owner.layers = torch.nn.ModuleList([m.all[at] for at in keep])
        for seed in range(4):
            same(pair, lambda m: once(m, seed=seed))


def test_weights_that_are_frozen_move_or_are_exchanged(pair, replayed):
    warm(pair)
    for m in pair:
        for name, p in layers_of(m)[2].named_parameters():
            p.requires_grad_(p.requires_grad and "lora_A" not in name)
    for seed in range(6):
        same(pair, lambda m: once(m, seed=seed))
    for m in pair:
        for p in m.parameters():
            p.data = p.data.clone() * 1.25
    for seed in range(6):
        same(pair, lambda m: once(m, seed=seed))
    before = len(replayed)
    for m in pair:
        inner = layers_of(m)[1].inner
        inner.scaling["default"] *= 2
    for seed in range(6):
        same(pair, lambda m: once(m, seed=seed))
    assert len(replayed) > before, "recorded anew"


def test_weights_that_an_optimizer_changes_in_place(pair):
    curves = []
    for m in pair:
        optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        curves.append([])
        for seed in range(8):
            loss = m(**zoo.batch(seed=seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curves[-1].append(loss.item())
    assert curves[0] == pytest.approx(curves[1], rel=1e-4) and recorded(pair[0]) == 1


def test_evaluation_and_generation_between_steps(pair, replayed):
    warm(pair)
    for seed in range(3):
        losses = []
        for m in pair:
            m.eval()
            with torch.no_grad():
                losses.append(m(**zoo.batch(seed=seed)).loss.item())
            m.train()
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        same(pair, lambda m: once(m, seed=seed))
    assert not of(pair[0]).broken and len(replayed) >= 3


@pytest.mark.parametrize(
    "saved, total, asked, released",
    [(15, 10_000, 0, False), (25, 10_000, 50, False), (25, 1_000, 50, True), (60, 100, 120, False)],
)
def test_a_larger_shape_has_blocks_of_its_own_where_there_is_room(saved, total, asked, released):
    """Those of smaller shapes cannot be joined: they are given back first where memory is not plenty."""
    requests, releases = [], []
    recorder = SimpleNamespace(memory=lambda device: (0, total), release=lambda: releases.append(True))
    shared = SimpleNamespace(recorder=recorder, bytes=100, forget_buffers=lambda chain: None)
    shared.room = lambda inputs, needed, layers: requests.append(needed) is None
    chain = Chain([None, None], bytes=100, largest=40)
    assert stacks.Stacks(shared)._room(chain, SimpleNamespace(saved=saved), [torch.ones(1)])
    assert (requests, bool(releases), shared.bytes) == ([asked], released, 0 if released else 100)


def test_memory_that_is_given_back(pair):
    warm(pair)
    model, _ = pair
    assert state_of(model).replays.bytes > 0
    kept = [m(**zoo.batch(seed=3)).loss for m in pair]
    tunecompile.free(model)
    assert state_of(model).replays.bytes == 0
    losses = iter(kept)
    same(pair, lambda m: next(losses).backward())
    warm(pair)
    assert recorded(model) == 2


def test_a_stack_that_cannot_be_recorded(pair, monkeypatch):
    """Its layers are recorded one by one."""
    tries, plain = [], CpuRecorder.record

    def record(self, run, pool, device):
        tries.append(pool)
        if len(tries) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(self, run, pool, device)

    monkeypatch.setattr(CpuRecorder, "record", record)
    warm(pair)
    assert has(pair[0], "no-stack-recorded", detail="not permitted") and recorded(pair[0]) == 0
    assert state_of(pair[0]).replays.recorded == 8


class GivesEachItsOwn(torch.nn.Module):
    """An owner whose layers are given a value of their own in each pass, as Gemma 3n's are."""

    def __init__(self, own="fresh"):
        super().__init__()
        self.own = own
        self.embed = torch.nn.Embedding(256, 16)
        self.layers = torch.nn.ModuleList(TakesOne() for _ in range(4))

    def forward(self, ids):
        hidden, shared = self.embed(ids), self.embed(ids).detach()
        for place, layer in enumerate(self.layers):
            hidden = layer(hidden, self.value(place, ids, hidden, shared))
        return hidden

    def value(self, place, ids, hidden, shared):
        if self.own == "of two":
            return shared if place % 2 else self.embed(ids)
        if self.own == "written":
            return shared.add_(1)
        if self.own == "of hidden":
            return hidden.detach().mean()
        return self.embed(ids)


class TakesOne(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, hidden, own):
        return hidden + self.inner(hidden + own).sin()


@pytest.mark.parametrize("own, stacks_there", [("fresh", 1), ("of two", 1), ("written", 0), ("of hidden", None)])
def test_layers_that_are_given_values_of_their_own(monkeypatch, replayed, own, stacks_there):
    """All are replayed at the last such call. Not where somebody looks in between, or writes to what one was given."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)
    reference = GivesEachItsOwn(own)
    models = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference
    for seed in range(16):
        ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(seed))
        same(models, lambda m: m(ids).square().mean().backward())
    if stacks_there is None:
        assert replayed == [4, 4] and not recorded(models[0]) and state_of(models[0]).replays.recorded == 8
    else:
        assert recorded(models[0]) == stacks_there and bool(replayed) is bool(stacks_there)
        assert not of(models[0]).broken and (not replayed or set(replayed) == {4})


def test_what_a_later_call_brings_cannot_be_recorded(monkeypatch, replayed):
    """Layers before it run then, one by one, and after some such passes all of them do."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)
    reference = GivesEachItsOwn()
    models = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference
    suits = stacks.recordable
    monkeypatch.setattr(stacks, "recordable", lambda values, kind: len(values) != 3 and suits(values, kind))
    for seed in range(16):
        ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(seed))
        same(models, lambda m: m(ids).square().mean().backward())
    assert replayed == [4, 4] and not recorded(models[0]) and state_of(models[0]).replays.recorded == 8


def test_random_loops(pair):
    """Acts in any order."""
    rng = random.Random(0)
    held = []
    for seed in range(60):
        length = rng.choice([16, 16, 12])
        act = rng.choice(["step", "step", "step", "twice", "hold", "drop", "score", "free"])
        if act == "step":
            same(pair, lambda m: once(m, seed=seed, length=length))
        elif act == "twice":
            same(pair, lambda m: [m(**zoo.batch(seed=s, length=length)).loss for s in (1, 2)][1].backward())
        elif act == "hold":
            held = [m(**zoo.batch(seed=seed, length=length)).loss for m in pair]
        elif act == "drop":
            losses, held = iter(held), []
            if next(iter(losses), None) is not None:
                held = []
        elif act == "score":
            with torch.no_grad():
                ours, theirs = (m(**zoo.batch(seed=seed, length=length)).loss for m in pair)
            torch.testing.assert_close(ours, theirs)
        else:
            tunecompile.free(pair[0])


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "gemma2", "gemma3", "gpt_oss"])
def test_layers_of_several_kinds(monkeypatch, replayed, family):
    """Tables that the first kind does not read are arguments of all; those with a window have a mask of their own."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)
    reference = zoo.adapt(zoo.make(family, num_hidden_layers=3)).train()
    models = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference
    for seed, length in enumerate([16, 20, 16, 20, 16, 20, 20, 16]):
        batch = zoo.batch(seed=seed, length=length)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, length - 3 :] = 0
        batch["labels"][0, length - 3 :] = -100
        found = [(zoo.step(m, batch)) for m in models]
        (loss, ours), (expected, theirs) = found
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        size = max(gradient.norm() for gradient in theirs.values())
        assert max((ours[name] - theirs[name]).norm() for name in theirs) < 1e-5 * size
    assert set(replayed) == {3} and recorded(models[0]) and not of(models[0]).broken


def test_layers_that_hand_on_keys_stand_between_stacks(monkeypatch, replayed):
    """As in Gemma 4 E4B: of ten layers the fifth and sixth keep theirs for the last four; each has a value of its own."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 3 + ["full_attention"]
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 4}
    reference = zoo.adapt(zoo.make("gemma4", num_hidden_layers=10, layer_types=kinds, **own)).train()
    models = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference
    for seed in range(7):
        batch = zoo.batch(seed=seed, length=16)
        (loss, ours), (expected, theirs) = (zoo.step(m, batch) for m in models)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        size = max(gradient.norm() for gradient in theirs.values())
        assert max((ours[name] - theirs[name]).norm() for name in theirs) < 1e-4 * size
    assert len(replayed) >= 4 and set(replayed) == {4} and not of(models[0]).broken


def test_numbers_that_were_equal_by_chance(pair):
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


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, hidden_states, *_):
        return hidden_states + self.inner(hidden_states).sin()


class KeepsItsResult(Residual):
    def forward(self, hidden_states, *_):
        self.last = super().forward(hidden_states)
        return self.last


class KeepsItsInput(Residual):
    def forward(self, hidden_states, *_):
        self.seen = hidden_states
        return super().forward(hidden_states)


class ReturnsItsInput(Residual):
    def forward(self, hidden_states, *_):
        return super().forward(hidden_states), hidden_states


class ReadsAnArgument(Residual):
    def forward(self, hidden_states, scale):
        return super().forward(hidden_states) + scale


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Toy(torch.nn.Module):
    """An owner whose own code decides what happens between layers."""

    def __init__(self, layer=Residual, between=lambda self, place, hidden: hidden, shared=False):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.layers = torch.nn.ModuleList([layer() for _ in range(2 if shared else 4)] * (2 if shared else 1))
        self.between, self.looks, self.kept = between, False, []

    def forward(self, ids):
        hidden, self.kept = self.embed(ids), []
        self.scale = torch.ones(1)
        for place, layer in enumerate(self.layers):
            hidden = layer(hidden, self.scale)
            if isinstance(hidden, tuple):
                self.kept.append(hidden[1])
                hidden = hidden[0]
            if self.looks:
                hidden = self.between(self, place, hidden)
        return hidden


def toys(monkeypatch, *given, **named):
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)
    reference = Toy(*given, **named)
    return tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference


def train(models, loss=lambda m, out: out.square().mean(), steps=12, looks=lambda step: step > 6):
    for step in range(steps):
        ids, found = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step)), []
        for m in models:
            m.zero_grad(set_to_none=True)
            m.looks = looks(step)
            value = loss(m, m(ids))
            value.backward()
            found.append((value.detach(), gradients(m)))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert found[0][1].keys() == found[1][1].keys() and max(zoo.errors(found[0][1], found[1][1]).values()) < 1e-4


def test_layers_and_weights_that_are_shared(monkeypatch, replayed):
    train(toys(monkeypatch, shared=True))
    assert replayed
    models = toys(monkeypatch)
    for m in models:
        for layer in m.layers:
            layer.inner.weight = m.layers[0].inner.weight
    train(models)


def aux_loss(m, out):
    seen = [getattr(layer, "last", getattr(layer, "seen", None)) for layer in m.layers]
    return out.square().mean() + sum(each.square().mean() for each in (*seen, *m.kept) if each is not None)


@pytest.mark.parametrize("layer", [KeepsItsResult, KeepsItsInput, ReturnsItsInput])
def test_layers_that_do_more_than_return_a_result(monkeypatch, replayed, layer):
    """What they keep is theirs: no layer of such a kind is in a stack."""
    train(toys(monkeypatch, layer), loss=aux_loss)
    assert not replayed


def norm_without_gradient(self, place, hidden):
    with torch.no_grad():
        self.norm = hidden.norm()
    return hidden


def reads_in_inference_mode(self, place, hidden):
    with torch.inference_mode():
        self.norm = hidden.norm()
    return hidden


def reads_under_autocast(self, place, hidden):
    with torch.autocast("cpu", torch.bfloat16):
        self.norm = hidden.sum()
    return hidden


def keeps(self, place, hidden):
    self.kept.append(hidden)
    return hidden


def doubles(self, place, hidden):
    return Doubles.apply(hidden)


def writes_the_argument(self, place, hidden):
    self.scale += 0.5
    return hidden


def checkpoints(reentrant):
    def between(self, place, hidden):
        return torch.utils.checkpoint.checkpoint(torch.sin, hidden, use_reentrant=reentrant)

    return between


@pytest.mark.parametrize(
    "between",
    [norm_without_gradient, reads_in_inference_mode, reads_under_autocast, keeps, doubles, writes_the_argument]
    + [checkpoints(True), checkpoints(False)],
)
@pytest.mark.parametrize("layer", [Residual, ReadsAnArgument])
def test_code_between_layers(monkeypatch, replayed, between, layer):
    """It begins when the stack is replayed, and goes on; and what it keeps is on the way of the loss."""
    models = toys(monkeypatch, layer, between)
    train(models, loss=aux_loss)
    assert replayed
    train(toys(monkeypatch, layer, between), loss=aux_loss, looks=lambda step: True)


def test_a_model_between_the_layers_of_another(monkeypatch):
    """Each has its own stacks."""
    side = toys(monkeypatch)
    train(side)

    def between(self, place, hidden):
        return hidden + self.side(torch.arange(8)[None] % 64) if place == 1 else hidden

    models = toys(monkeypatch, Residual, between)
    for m, beside in zip(models, side):
        vars(m)["side"] = beside
    train(models)


def test_an_error_without_a_message(monkeypatch):
    def fail(self, run, pool, device):
        raise NotImplementedError

    models = toys(monkeypatch)
    monkeypatch.setattr(CpuRecorder, "record", fail)
    train(models)
    assert has(models[0], "no-stack-recorded", detail="NotImplementedError")
