"""Tensors of the user's that are written to, in place, between two uses: each use sees what they held then."""

import pytest
import torch
import torch.nn.functional as F

from tests.support import zoo
from tests.support.batches import lengths_mask
from tests.support.compare import assert_same_run
from tests.support.models.pairs import of_plain_layers, pair
from tunecompile.runtime.unpad.masks.one_form import in_one_form

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = [(6, 4), (6, 5), (3, 6), (6, 6), (2, 6)]


def of_pairs(mask: torch.Tensor) -> torch.Tensor:
    """Causal [B, 1, T, T], without padding."""
    return mask.bool()[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize("form", [lambda mask: mask, of_pairs], ids=["rows", "pairs"])
def test_a_mask_that_is_refilled_for_each_batch(form):
    """One buffer, as loops that save allocations have it: a mask of rows, or of pairs, which layers are given as it is."""
    model, reference = pair(lambda: zoo.make("llama", num_hidden_layers=2))
    buffer = form(lengths_mask(6, 6)).clone()
    for seed, lengths in enumerate(LENGTHS):
        mask = lengths_mask(*lengths)
        buffer.copy_(form(mask))
        batch = zoo.batch(length=6, seed=seed)
        labels = batch["labels"].masked_fill(mask == 0, -100)
        given = {"input_ids": batch["input_ids"], "attention_mask": buffer, "labels": labels}
        assert_same_run(model, reference, lambda m: m(**given).loss)


def test_a_mask_in_one_form_that_was_written_to():
    one, call = torch.ones(1, 1, 6, 6, dtype=torch.bool), type("Call", (), {"masks_in_one_form": {}})()
    view = one.expand(2, 1, 6, 6)
    (first,), _ = in_one_form(call, (view,), {})
    one.tril_()
    (second,), _ = in_one_form(call, (view,), {})
    assert first.all() and second.equal(one.expand(2, 1, 6, 6))


def test_a_bias_that_changes_once_it_was_added_to_logits():
    model, reference = pair(of_plain_layers)
    bias = torch.linspace(-2.0, 2.0, 256)

    def loss(m):
        added, inputs = bias.clone(), zoo.batch()
        logits = m(inputs["input_ids"]).logits + added
        added.mul_(-3)
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    for _ in range(2):
        assert_same_run(model, reference, loss)


def test_a_temperature_that_was_applied_in_place():
    model, reference = pair(of_plain_layers)

    def loss(m):
        inputs = zoo.batch()
        logits = m(inputs["input_ids"]).logits
        rows = logits.flatten(0, 1)
        logits.div_(0.5)  # of which `rows` is a view
        return F.cross_entropy(rows, inputs["labels"].flatten())

    for _ in range(2):
        assert_same_run(model, reference, loss)
