"""Stacks of layers of several kinds, whose sizes change, and that are given values of their own."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import token_wise, without_mlps
from tests.support.stacks import TakesOne, of, recorded, same
from tunecompile.runtime.cuda_graphs import stacks
from tunecompile.runtime.model_state import state_of

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_sizes_and_padding_change(on_cpu, replayed):
    """Padded batches run as rows without padding, whose sizes are rounded: each is recorded once."""
    reference = token_wise(num_hidden_layers=3).train()
    models = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference
    for seed, length in enumerate([16, 12, 16, 12, 9, 16, 12, 9, 16, 12]):
        batch = zoo.batch(seed=seed, length=length)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if seed % 3:
            batch["attention_mask"][0, length - 3 :] = 0
            batch["labels"][0, length - 3 :] = -100
        same(models, lambda m: m(**batch).loss.backward())
    assert recorded(models[0]) >= 2 and set(replayed) == {3} and not of(models[0]).broken


def test_layers_of_several_kinds(on_cpu, replayed):
    """Tables that the first kind does not read are arguments of all; those with a window have a mask of their own."""
    model = without_mlps(zoo.make("lfm2", num_hidden_layers=3))
    reference = zoo.adapt(model, target_modules=["in_proj", "q_proj"]).train()
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


def test_layers_that_hand_on_keys_stand_between_stacks(on_cpu, replayed):
    """As in Gemma 4 E4B: of six layers the third and fourth keep theirs for the last two; each has a value of its own."""
    kinds = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"]
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 2}
    model = without_mlps(zoo.make("gemma4", num_hidden_layers=6, layer_types=kinds, **own))
    reference = zoo.adapt(model, target_modules=["q_proj", "v_proj"]).train()
    models = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference
    for seed in range(7):
        batch = zoo.batch(seed=seed, length=16)
        (loss, ours), (expected, theirs) = (zoo.step(m, batch) for m in models)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        size = max(gradient.norm() for gradient in theirs.values())
        assert max((ours[name] - theirs[name]).norm() for name in theirs) < 1e-4 * size
    assert len(replayed) >= 4 and set(replayed) == {2} and not of(models[0]).broken
    assert tunecompile.report(models[0]).compiles == 4, "layers that keep keys have the graph of those that could"


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


@pytest.mark.parametrize("own, stacks_there", [("fresh", 1), ("of two", 1), ("written", 0), ("of hidden", None)])
def test_layers_that_are_given_values_of_their_own(on_cpu, replayed, own, stacks_there):
    """All are replayed at the last such call. Not where somebody looks in between, or writes to what one was given."""
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


def test_what_a_later_call_brings_cannot_be_recorded(on_cpu, replayed, monkeypatch):
    """Layers before it run then, one by one, and after some such passes all of them do."""
    reference = GivesEachItsOwn()
    models = tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference
    suits = stacks.recordable
    monkeypatch.setattr(stacks, "recordable", lambda values, kind: len(values) != 3 and suits(values, kind))
    for seed in range(16):
        ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(seed))
        same(models, lambda m: m(ids).square().mean().backward())
    assert replayed == [4, 4] and not recorded(models[0]) and state_of(models[0]).replays.recorded == 8
