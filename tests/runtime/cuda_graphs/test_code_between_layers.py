"""What the code of an owner does between the layers of a stack, and layers that do more than return a result."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.memory.cpu_recorder import CpuRecorder
from tests.support.notes import has
from tests.support.stacks import TakesOne, gradients

pytestmark = pytest.mark.filterwarnings("ignore")


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


def pair_of(reference):
    return tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference


def toys(*given, **named):
    return pair_of(Toy(*given, **named))


def train(models, loss=lambda m, out: out.square().mean(), steps=12, looks=lambda step: step > 6, rate=0.0):
    """Both have the same losses and gradients, and keep the same, read when weights have changed at this rate."""
    for step in range(steps):
        ids, found = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step)), []
        for m in models:
            m.zero_grad(set_to_none=True)
            m.looks = looks(step)
            value = loss(m, m(ids))
            value.backward()
            found.append((value.detach(), gradients(m)))
            with torch.no_grad():
                for parameter in m.parameters() if rate else ():
                    parameter -= 0 if parameter.grad is None else rate * parameter.grad
        torch.testing.assert_close(found[0][0], found[1][0])
        for ours, theirs in zip(*(m.kept for m in models)):
            torch.testing.assert_close(ours.detach(), theirs.detach())
        assert found[0][1].keys() == found[1][1].keys() and max(zoo.errors(found[0][1], found[1][1]).values()) < 1e-4


def test_layers_and_weights_that_are_shared(on_cpu, replayed):
    train(toys(shared=True))
    assert replayed
    models = toys()
    for m in models:
        for layer in m.layers:
            layer.inner.weight = m.layers[0].inner.weight
    train(models)


def aux_loss(m, out):
    seen = [getattr(layer, "last", getattr(layer, "seen", None)) for layer in m.layers]
    return out.square().mean() + sum(each.square().mean() for each in (*seen, *m.kept) if each is not None)


@pytest.mark.parametrize("layer", [KeepsItsResult, KeepsItsInput, ReturnsItsInput])
def test_layers_that_do_more_than_return_a_result(on_cpu, replayed, layer):
    """What they keep is theirs: no layer of such a kind is in a stack."""
    train(toys(layer), loss=aux_loss)
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


LOOKS = [norm_without_gradient, reads_in_inference_mode, reads_under_autocast, doubles, checkpoints(True)]


@pytest.mark.parametrize(
    "layer, between",
    [
        *((Residual, between) for between in (*LOOKS, checkpoints(False), keeps)),
        *((ReadsAnArgument, between) for between in (keeps, writes_the_argument)),
    ],
)
def test_code_between_layers(on_cpu, waits, replayed, layer, between):
    """It begins when the stack is replayed, and goes on; and what it keeps is on the way of the loss."""
    models = toys(layer, between)
    train(models, loss=aux_loss)
    assert replayed
    train(toys(layer, between), loss=aux_loss, looks=lambda step: True)


def test_a_model_between_the_layers_of_another(on_cpu):
    """Each has its own stacks."""
    side = toys()
    train(side)

    def between(self, place, hidden):
        return hidden + self.side(torch.arange(8)[None] % 64) if place == 1 else hidden

    models = toys(Residual, between)
    for m, beside in zip(models, side):
        vars(m)["side"] = beside
    train(models)


def test_an_error_without_a_message(on_cpu, monkeypatch):
    def fail(self, run, pool, device):
        raise NotImplementedError

    models = toys()
    monkeypatch.setattr(CpuRecorder, "record", fail)
    train(models)
    assert has(models[0], "no-stack-recorded", detail="NotImplementedError")


class Steps(torch.nn.Module):
    """An owner whose code is a function, which knows whether it `looks`."""

    def __init__(self, run):
        super().__init__()
        self.run, self.looks, self.kept = run, False, []
        self.embed, self.other = torch.nn.Embedding(64, 16), torch.nn.Embedding(64, 16)
        self.layers = torch.nn.ModuleList(TakesOne() for _ in range(4))

    def forward(self, ids):
        self.kept = []
        return self.run(self, ids, self.looks)


def each(m, ids, own):
    hidden = m.embed(ids)
    for place, layer in enumerate(m.layers):
        hidden = layer(hidden, own(place, hidden))
    return hidden


def with_an_earlier_result(m, ids, late):
    first = hidden = m.layers[0](m.embed(ids), m.other(ids))
    for layer in m.layers[1:3]:
        hidden = layer(hidden, m.other(ids))
    return m.layers[3](hidden, first)


def with_results_of_both(m, ids, late):
    """Of the layer before, and of the one before that."""
    earlier, hidden = m.other(ids), m.embed(ids)
    for layer in m.layers:
        earlier, hidden = hidden, layer(hidden, earlier)
    return hidden


def with_its_hidden_states_twice(m, ids, late):
    return each(m, ids, lambda place, hidden: hidden if late and place == 2 else m.other(ids))


def on_an_older_result(m, ids, late):
    own, older = m.other(ids), m.embed(ids)
    hidden = m.layers[0](older, own)
    second = m.layers[1](hidden, own)
    return m.layers[3](m.layers[2](hidden if late else second, own), own)


def whose_result_is_dropped(m, ids, late):
    own, hidden = m.other(ids), m.embed(ids)
    for place, layer in enumerate(m.layers):
        made = layer(hidden, own)
        hidden = hidden if late and place == 1 else made
    return hidden


def whose_own_value_is_written_to(m, ids, late):
    own = [m.other(ids).detach() for _ in m.layers]

    def value(place, hidden):
        if late and place == 3:
            own[1].add_(1)
        return own[place]

    return each(m, ids, value)


def whose_first_input_is_written_to(m, ids, late):
    own, first = m.other(ids).detach(), m.embed(ids) * 1
    hidden = m.layers[1](m.layers[0](first, own), own)
    if late:
        first.add_(1)
    return m.layers[3](m.layers[2](hidden, own), own)


def left_early(m, ids, late):
    """And the first result is read when weights have changed."""
    own, hidden = m.other(ids), m.embed(ids)
    for place, layer in enumerate(m.layers):
        if late and place == 3:
            return hidden * 1
        hidden = layer(hidden, own)
        m.kept += [hidden] if late and place == 0 else []
    return hidden


@pytest.mark.parametrize(
    "run",
    [with_an_earlier_result, with_results_of_both, with_its_hidden_states_twice, on_an_older_result]
    + [whose_result_is_dropped, whose_own_value_is_written_to, whose_first_input_is_written_to, left_early],
)
def test_layers_run(on_cpu, waits, replayed, run):
    """In each step, or in the tenth, by when their stack is replayed."""
    train(pair_of(Steps(run)), steps=13, looks=lambda step: step == 9, rate=0.1)
    assert replayed
