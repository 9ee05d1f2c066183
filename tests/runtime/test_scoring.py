"""Forwards without gradients of a model in training (a reference in DPO, the old policy in GRPO) run the code that training runs."""

from collections import Counter

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import adapted_layers, pair, small
from tests.support.notes import EAGER, find

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def score(model: torch.nn.Module, seed: int = 1, **shape) -> torch.Tensor:
    with torch.no_grad():
        return model(zoo.batch(seed=seed, **shape)["input_ids"], use_cache=False).logits


def compiled(model: torch.nn.Module) -> dict[str, int]:
    """Graphs by what stands in a region's name after its layers."""
    found: Counter[str] = Counter()
    for key, variant in (item for region in model._tunecompile.regions for item in region.variants.items()):
        found[key[0] if isinstance(key[0], str) else "training"] += variant.graphs
    return found


def test_scores_are_compiled_and_right():
    pytest.importorskip("peft")
    model, reference = pair(adapted_layers)
    for m in (model, reference):
        zoo.step(m, zoo.batch())
    for _ in range(2):
        assert torch.allclose(score(model), score(reference), atol=1e-5)
        with model.disable_adapter(), reference.disable_adapter():
            assert torch.allclose(score(model), score(reference), atol=1e-5)
    assert compiled(model) == {"training": 1, "without_adapters": 1}
    told = tunecompile.report(model)
    assert {m.family: m.found for m in told.matches}["lora"] == 1  # of a layer as it trains
    assert not find(told, *EAGER)


def log_probs(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    """As trainers take them of logits."""
    logits = model(**inputs).logits[:, :-1] / 0.7
    return logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]


@pytest.mark.slow
def test_log_probabilities_of_a_reference_make_no_logits(made):
    """And those of the old policy are the new one's to the bit. Logits that are read are real."""
    model, reference = pair(lambda: zoo.adapt(small()))
    inputs = {"input_ids": zoo.batch()["input_ids"], "use_cache": False}
    with torch.no_grad():
        old = log_probs(model, inputs)
        expected = log_probs(reference, inputs)
        assert torch.allclose(old, expected, atol=1e-5) and not made and not old.requires_grad
    new = log_probs(model, inputs)
    assert torch.equal(new, old) and not made and new.requires_grad
    with torch.no_grad():
        logits = model(**inputs).logits
        assert torch.allclose(logits.exp(), reference(**inputs).logits.exp(), rtol=1e-4) and len(made) == 1
    model.get_base_model().lm_head.weight.requires_grad_()
    with torch.no_grad():
        assert type(model(**inputs).logits) is torch.Tensor, "they could be read after the optimizer's step"
