"""Batches and models that keep their padding: the padded run, and the reason in the report."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_close, assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import EAGER, find, has
from tests.support.reports import flattened
from tunecompile.runtime.unpad import refusals

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def without(inputs: dict, *names: str, **more) -> dict:
    return {key: value for key, value in inputs.items() if key not in names} | more


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, said",
    [
        (lambda b: without(b, labels=b["input_ids"]), "labels-at-padding"),
        (
            lambda b: without(
                padded(side="left"),
                labels=padded(side="left")["input_ids"].where(padded(side="left")["attention_mask"] == 1, -100),
            ),
            "labels-at-padding",
        ),
        (
            lambda b: without(
                b,
                attention_mask=b["attention_mask"] * (torch.arange(20) != 3),
                labels=b["labels"].where(torch.arange(20) > 5, -100),
            ),
            "row-interrupted",
        ),
        (lambda b: without(b, output_hidden_states=True), "output-required"),
        (lambda b: without(b, use_cache=True), "cache-used"),
    ],
    ids=["unmasked", "first token", "holes", "hidden states", "cache"],
)
def test_batches_that_keep_their_padding(change, said):
    model, reference = pair(attending)
    assert_same_flattened(model, reference, change(padded()))
    assert has(model, "padding-kept", reason=said) and not find(model, "padding-removed")
    assert all(note.subject == "output_hidden_states" for note in find(model, "output-required"))
    assert_same_flattened(model, reference, padded())
    assert has(model, "padding-removed")


def test_a_loss_of_the_users_own_may_read_padding():
    model, reference = pair(attending)
    losses = []
    for m in (model, reference):
        inputs = padded()
        labels = inputs.pop("labels")
        losses.append(F.cross_entropy(m.train()(**inputs).logits.flatten(0, 1), labels.flatten()).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert has(model, "padding-kept", reason="no-labels")


def beside_tokens(model: nn.Module) -> nn.Module:
    """With a second table, as large as that of tokens."""
    model.model.places = nn.Embedding(*model.model.embed_tokens.weight.shape)
    return model


@pytest.mark.parametrize(
    "build, said",
    [
        pytest.param(lambda: attending(attention_dropout=0.1), "attention-dropout", marks=pytest.mark.slow),
        pytest.param(  # it divides scores in place
            lambda: zoo.make("falcon", attn_implementation="eager"), "mixes-tokens", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda: zoo.make("gemma3", use_bidirectional_attention=True, sliding_window=6),
            "masks-not-understood",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dropout", "divided", "bidirectional"],
)
def test_models_that_keep_their_padding(build, said):
    model, reference = pair(build)
    for seed in range(2):
        inputs = padded(seed=seed)
        torch.manual_seed(0)
        loss = zoo.step(model, inputs)[0]
        torch.manual_seed(0)
        if "dropout" not in said:
            assert loss.item() == pytest.approx(zoo.step(reference, inputs)[0].item(), rel=1e-5)
    assert has(model, "padding-kept", reason=said) and not find(model, "padding-removed"), tunecompile.report(model)
    assert not find(model, "ran-eagerly")


@pytest.mark.slow
def test_a_model_that_is_not_causal_loses_its_padding():
    model, reference = pair(lambda: zoo.make("gemma3", use_bidirectional_attention=True))
    for side in ("right", "left"):
        inputs = padded(side=side)
        assert_close(zoo.step(model, inputs), zoo.step(reference, inputs), limit=1e-4, floor=1e-4)
    assert has(model, "padding-removed") and not find(model, "ran-eagerly")


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda: attending(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        lambda: beside_tokens(attending()),
    ],
    ids=["dynamic", "positions"],
)
def test_what_is_computed_ahead_of_the_layers_sees_the_batch_as_it_is(build):
    """Frequencies that follow the length, another table of embeddings: only layers run without padding."""
    model, reference = pair(build)
    for seed in range(2):
        assert_same_flattened(model, reference, padded(seed=seed))
    assert flattened(model) == 2


class Deaf(nn.Module):
    """A wrapper of attention that takes no further keywords."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        return self.inner(
            hidden_states=hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings
        )


class Average(nn.Module):
    """Mixes tokens without attention, and is told of no mask."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states.cumsum(1) / torch.arange(1, hidden_states.shape[1] + 1)[:, None], None


class Shifted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.mix = inner, nn.Conv1d(64, 64, 2, padding=1)

    def forward(self, hidden_states, **kwargs):
        return self.inner(hidden_states=self.mix(hidden_states.transpose(1, 2))[..., :-1].transpose(1, 2), **kwargs)


class Reading(Deaf):
    """Lets tokens see the first one besides."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        if attention_mask is not None:
            attention_mask = attention_mask | (torch.arange(attention_mask.shape[-1]) == 0)
        return super().forward(hidden_states, attention_mask, **kwargs)


class Centred(Deaf):
    """Takes the mean of a channel over a call's tokens away."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states - hidden_states.mean((0, 1)), **kwargs)


def wrapped(wrap, only=None):
    torch.manual_seed(0)
    model = attending(num_hidden_layers=3)
    for at, layer in enumerate(model.model.layers):
        if only in (None, at):
            layer.self_attn = wrap(layer.self_attn)
    return model


@pytest.mark.parametrize(
    "wrap, said",
    [
        pytest.param(lambda inner: Average(), "mixes-tokens", id="average", marks=pytest.mark.slow),
        pytest.param(Shifted, "mixes-tokens", id="convolution", marks=pytest.mark.slow),
        pytest.param(Centred, "mixes-tokens", id="centred", marks=pytest.mark.slow),
        pytest.param(Reading, "mixes-tokens", id="mask"),
    ],
)
def test_layers_that_cannot_go_without_padding(wrap, said, monkeypatch):
    monkeypatch.setattr(refusals, "_foreign", lambda module: None)  # as if they were another package's
    model, reference = pair(lambda: wrapped(wrap))
    for seed in range(2):
        assert_same_flattened(model, reference, padded(seed=seed))
    assert has(model, "padding-kept", reason=said) and not find(model, "padding-removed"), tunecompile.report(model)
    assert not find(model, *EAGER)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="no budget"), pytest.param({"memory": "64KiB"}, id="a budget")],
)
def test_the_last_layer_cannot_go_without_padding(options, monkeypatch):
    """Layers before it have left padding out, which it reads: the step begins anew."""
    monkeypatch.setattr(refusals, "_foreign", lambda module: None)
    model, reference = pair(lambda: wrapped(Centred, only=2), **options)
    for seed in range(2):
        assert_same_flattened(model, reference, padded(seed=seed))
    assert has(model, "padding-kept", reason="mixes-tokens") and not find(model, "padding-removed")


@pytest.mark.slow
def test_layers_that_hand_on_what_they_know(monkeypatch):
    """Offsets come by the mask, so no keyword has to be passed on."""
    monkeypatch.setattr(refusals, "_foreign", lambda module: None)
    model, reference = pair(lambda: wrapped(Deaf))
    assert_same_flattened(model, reference, padded())
    assert flattened(model) == 1


def test_models_without_the_interface():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, mask):
            return x + self.linear(x) * mask[..., None]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(Layer() for _ in range(3))

        def forward(self, input_ids, attention_mask, labels):
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x, attention_mask)
            return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), labels.flatten())

    model, reference = pair(lambda: Model().train())
    inputs = padded(vocabulary=16)
    assert model(**inputs).item() == pytest.approx(reference(**inputs).item(), rel=1e-5)
    assert has(model, "padding-kept", reason="no-mask-in-layers")
