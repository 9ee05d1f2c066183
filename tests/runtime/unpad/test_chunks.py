"""Chunked attention (Llama 4): a chunk is a document, in whole, padded and packed rows."""

import pytest

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import pair
from tests.support.reports import flattened, told_apart

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def llama4(**more):
    """Three layers with positions for each without."""
    return pair(lambda: zoo.make("llama4", num_hidden_layers=2, use_cache=False, attention_chunk_size=6, **more))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_chunks_are_documents(implementation):
    model, reference = llama4(no_rope_layers=[1, 1], attn_implementation=implementation)
    for inputs in (zoo.batch(256, 2, 16), padded(seed=1), packed((7, 9), (4, 12))):
        assert_same_flattened(model, reference, inputs)
    report = tunecompile.report(model)
    assert flattened(model) == 1 and told_apart(model) == 2 and not report.notes[2:], report
    assert report.regions[0].providers["varlen_attention: reference"], report
