"""Batches with and without padding, one after another, in layers that keep their padding: gradients are eager's."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_close
from tests.support.models.pairs import pair
from tests.support.notes import fell_back, has
from tests.support.rounding import whole
from tunecompile.runtime.unpad.masks.one_form import in_one_form

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = dict(loss=1e-6, limit=1e-6)  #: of models in fp64, whose norms and losses are in fp32
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
OFF = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def bert():
    return tf.BertForSequenceClassification(tf.BertConfig(**SIZES, **OFF, num_labels=3, max_position_embeddings=64))


def classes(batch: dict) -> dict:
    """A class a row."""
    return {**batch, "labels": torch.arange(len(batch["labels"])) % 3}


def follow(ours, plain, batches, as_task=dict) -> None:
    for batch in batches:
        assert_close(zoo.step(ours, as_task(batch)), zoo.step(plain, as_task(batch)), **EXACT)


def compiled(model) -> list[int]:
    return [region.compiles for region in tunecompile.report(model).regions]


BATCHES = [whole(20), padded(), padded(3, 24, "left"), whole(24), whole(9, 5), whole(20)]


def test_batches_with_and_without_masks():
    ours, plain = pair(lambda: bert().double())
    follow(ours, plain, BATCHES, classes)
    assert max(compiled(ours)) == 3 and not fell_back(ours)  # without masks: the first sizes, and all others


@pytest.mark.slow
def test_rows_that_lose_their_padding_and_see_both_ways():
    """Masked language models: padded rows are documents, and so are whole ones of another length."""

    def make():
        return tf.BertForMaskedLM(tf.BertConfig(**SIZES, **OFF, max_position_embeddings=64)).double()

    ours, plain = pair(make)
    follow(ours, plain, BATCHES)
    assert compiled(ours) == [2] and has(ours, "padding-removed", count=2) and has(ours, "whole-by-padded", count=2)


@pytest.mark.parametrize("dropout", [1e-8, 0.5])
def test_rows_lose_their_padding_where_attention_has_dropout(dropout):
    """Next to none is dropped, and gradients are eager's; or half of it, other weights in each step."""
    config = tf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=dropout)
    ours, plain = pair(lambda: tf.BertForMaskedLM(config).double())
    if dropout < 0.1:
        follow(ours, plain, BATCHES[1:3])
    else:
        losses = [zoo.step(ours, BATCHES[1])[0] for _ in range(3)]
        assert len({float(loss) for loss in losses}) == 3
    (region,) = tunecompile.report(ours).regions
    assert region.providers["dropout_attention: reference"] and has(ours, "padding-removed") and not fell_back(ours)


def test_rows_lose_their_padding_where_windows_see_both_ways():
    """ModernBERT: its first layer sees all of a document, the second those nearer than 5."""
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    config = tf.ModernBertConfig(**SIZES, **tokens, local_attention=8, global_attn_every_n_layers=2)
    ours, plain = pair(lambda: tf.ModernBertForMaskedLM(config).double())
    follow(ours, plain, [padded(), padded(3, 24, "left")])
    assert has(ours, "padding-removed", count=2) and not fell_back(ours)
    assert all(region.providers["varlen_attention: reference"] for region in tunecompile.report(ours).regions)


def test_masks_of_one_row_are_written_out_once_for_all_layers():
    one, rows = torch.ones(1, 1, 6, 6, dtype=torch.bool).expand(2, 1, 6, 6), torch.ones(2, 1, 6, 6, dtype=torch.bool)
    call = type("Call", (), {"masks_in_one_form": {}})()
    (hidden, first), named = in_one_form(call, (torch.zeros(2, 6, 4), one), {"mask": one, "other": rows})
    (_, second), _ = in_one_form(call, (hidden, one), {})
    assert first is second is named["mask"] and first.is_contiguous() and not first._is_view() and first.equal(one)
    assert named["other"] is rows
    (view,), _ = in_one_form(None, (rows[:, :, :],), {})
    assert not view._is_view() and view.data_ptr() == rows.data_ptr()
