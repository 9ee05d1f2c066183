"""Padded batches in a model that users look at: noise on embeddings, interrupted calls, configs, evaluation, generation."""

import pytest
import torch
import torch.nn.functional as F

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair, token_wise
from tests.support.reports import flattened

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_noise_on_embeddings_keeps_its_size():
    """NEFTune's is alpha / sqrt(T * H), so its hook must see the batch as it is."""
    neftune_post_forward_hook = pytest.importorskip("transformers.integrations.neftune").neftune_post_forward_hook
    size = []
    for m in pair(token_wise):
        embed = m.get_input_embeddings()
        embed.neftune_noise_alpha = 5.0
        embed.register_forward_hook(neftune_post_forward_hook)
        embed.register_forward_hook(
            lambda mod, a, o: size.append((o - F.embedding(a[0], mod.weight)).abs().max().item())
        )
        zoo.step(m, padded(8, 32))
    assert size[0] == pytest.approx(size[1], rel=0.05)


def test_labels_of_which_the_loss_reads_others(monkeypatch):
    """TRL's fused head reads shift_labels, where they are given."""
    from tunecompile.integrations import loss_caller

    model = token_wise()
    monkeypatch.setattr(loss_caller, "_LOSSES", (__name__, "transformers."))

    def forward(self, labels, shift_labels):
        return loss_caller.causal_labels()

    batch = padded()
    assert (
        forward(model, batch["labels"], None)[0] is batch["labels"]
        and forward(model, batch["labels"], batch["labels"])[0] is None
    )


def test_labels_of_a_call_that_was_interrupted():
    """No hook is told of its end."""
    model, reference = pair(token_wise)

    def interrupt(*_):
        raise KeyboardInterrupt

    inputs, found = padded(), []
    for m in (model, reference):
        with m.train().model.layers[1].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            m(**inputs)
        found.append(m.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state)
    torch.testing.assert_close(*found)


def test_configs_stay_as_they_are():
    """Another model may share them, and be under way in another thread."""
    model, _ = pair(attending)
    seen = []
    model.config.__class__ = type(
        "Watched",
        (type(model.config),),
        {"__setattr__": lambda self, name, value: (seen.append(name), object.__setattr__(self, name, value))[1]},
    )
    zoo.step(model, padded())
    assert flattened(model) == 1 and not seen


def test_steps_evaluation_and_generation():
    model, reference = pair()
    for seed in range(2):
        assert_same_flattened(model, reference, padded(3 + seed, 20 + seed, "right", seed))
    assert flattened(model) == 2 and tunecompile.report(model).compiles == 1
    assert model.config._attn_implementation == reference.config._attn_implementation == "sdpa"
    for m in (model, reference):
        m.eval()
    inputs = padded(side="right")
    assert torch.allclose(model(**inputs).logits, reference(**inputs).logits, atol=1e-5)
    prompt = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"].flip(1)}
    assert torch.equal(
        model.generate(**prompt, max_new_tokens=3, do_sample=False),
        reference.generate(**prompt, max_new_tokens=3, do_sample=False),
    )
