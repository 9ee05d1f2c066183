"""Estimates of rows that begin alike: layers compute the prefix once, heads each row."""

import functools

import pytest

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import without_mlps
from tunecompile.errors import BadSharedPrefix

pytest.importorskip("transformers")
pytest.importorskip("peft")
ROWS, LENGTH, PREFIX = 4, 96, 64


@functools.cache
def estimated(kind, shared_prefix, rows=ROWS, length=LENGTH, **adapters):
    model = zoo.adapt(without_mlps(zoo.make(kind)), target_modules=["q_proj", "in_proj"], **adapters).train()
    return tunecompile.estimate(model, (rows, length), shared_prefix=shared_prefix, gpu="h200")


def test_layers_count_a_prefix_once():
    whole, shared = estimated("llama", 0), estimated("llama", PREFIX)
    computed = PREFIX + ROWS * (LENGTH - PREFIX)
    layers_alone = estimated("llama", 0, 1, computed)  # its head has fewer rows, and attention another length
    assert layers_alone.activations < shared.activations < whole.activations
    assert shared.flops < whole.flops and shared.milliseconds < whole.milliseconds
    assert not shared.notes or all(each.code != "prefixes-kept" for each in shared.notes)


@pytest.mark.parametrize(
    "kind, adapters, code", [("lfm2", {}, "prefix-uncounted"), ("llama", {"lora_dropout": 0.1}, "prefixes-kept")]
)
def test_others_count_each_row_and_say_why(kind, adapters, code):
    """Recurrences read whole rows, which is not estimated; dropout draws in each copy."""
    whole, shared = estimated(kind, 0, **adapters), estimated(kind, PREFIX, **adapters)
    assert shared.activations == whole.activations
    assert [each.code for each in shared.notes if each.code.startswith("prefix")] == [code]


def test_short_ones_are_not_shared():
    assert estimated("llama", 31).activations == estimated("llama", 0).activations


@pytest.mark.parametrize("shared_prefix", [-1, LENGTH])
def test_rows_are_longer_than_what_they_share(shared_prefix):
    with pytest.raises(BadSharedPrefix, match=f"fewer tokens than a row has, {LENGTH}"):
        estimated("llama", shared_prefix)
