"""What users put in the place of a model's own attention, masks, functions and layers is called as it would be without us."""

import pytest

from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import pair
from tests.support.notes import has

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def table(monkeypatch):
    """transformers' attention functions; put back behind the test."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "_global_mapping", dict(mapping))
    return type(ALL_ATTENTION_FUNCTIONS)


@pytest.mark.slow
def test_attention_that_is_replaced_between_two_steps(table):
    stock = table._global_mapping["sdpa"]
    model, reference = pair()
    assert_same_flattened(model, reference, padded())
    before = zoo.step(model, padded())[0].item()

    def every_token(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return stock(module, query, key, value, None, scaling=scaling, is_causal=False, **kwargs)

    table.register("sdpa", every_token)
    assert_same_flattened(model, reference, padded())
    assert zoo.step(model, padded())[0].item() != pytest.approx(before, rel=1e-4)
    assert has(model, "padding-kept", reason="mixes-tokens")
