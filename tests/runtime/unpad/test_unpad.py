"""Padded batches without their padding: loss and gradients as the padded run gives them, and the padded run wherever in doubt."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import has
from tests.support.reports import flattened

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


# -- the same numbers ---------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [1, 2]}],
    ids=str,
)
def test_an_adapter_that_trains_tokens(options):
    """A copy of the table beside the table, or a few rows of it: it still embeds nothing but tokens."""
    pytest.importorskip("peft")
    model, reference = pair(lambda: zoo.adapt(attending(), target_modules=["q_proj"], **options))
    assert_same_flattened(model, reference, padded(), limit=1e-4)
    assert flattened(model) == 1, tunecompile.report(model)


def test_logits_that_are_read_are_those_of_the_whole_batch():
    """Hidden states at padding would be zero without it: so the layers run again, with it. Nobody else holds what the
    layers' owner returned: its last norm's result is a view of a larger row."""
    (model, reference), inputs = pair(attending), padded()
    for _ in range(2):
        torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert flattened(model) == 1 and has(model, "padding-kept", reason="logits-read")


# -- any loop -----------------------------------------------------------------------------------------------------------
