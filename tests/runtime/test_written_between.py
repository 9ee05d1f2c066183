"""Tensors of the user's that are written to, in place, between two uses: each use sees what they held then."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import zoo
from tests.support.batches import lengths_mask
from tests.support.compare import assert_same_run
from tests.support.models.pairs import attending, of_plain_layers, pair
from tunecompile.runtime.unpad.decision import AS_IT_COMES
from tunecompile.runtime.unpad.masks.one_form import in_one_form
from tunecompile.runtime.unpad.masks.pairs import identity, version
from tunecompile.runtime.unpad.owner_call import MaskDecision
from tunecompile.runtime.unpad.unpad import Unpadding

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = [(6, 4), (6, 5), (3, 6), (6, 6), (2, 6)]


def of_pairs(mask: torch.Tensor) -> torch.Tensor:
    """Causal [B, 1, T, T], without padding."""
    return mask.bool()[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize("form", [lambda mask: mask, of_pairs], ids=["rows", "pairs"])
def test_a_mask_that_is_refilled_for_each_batch(form):
    """One buffer, as loops that save allocations have it: a mask of rows, or of pairs, which layers are given as it is."""
    model, reference = pair(attending)
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


def test_what_was_decided_for_a_mask_that_was_written_to():
    """Its documents are looked for again: a later layer of the same call may see others."""
    mask, decided = torch.ones(2, 1, 6, 6, dtype=torch.bool), []

    def decide(layer, mask, call):
        decided.append(version(mask))
        padding.masks[identity(mask)] = MaskDecision(call, version(mask), AS_IT_COMES)

    padding = SimpleNamespace(running=SimpleNamespace(refused=None, given={}), masks={}, _decide=decide)
    for _ in range(2):
        for layer in (nn.Identity(), nn.Identity()):
            Unpadding._decided(padding, layer, mask)
        mask.tril_()
    assert decided == [0, 1]


class Between(nn.Module):
    """Layers under one mask, which its owner makes narrower from layer to layer, in place."""

    def __init__(self):
        super().__init__()
        given = attending(num_hidden_layers=3)
        self.embed, self.layers, self.head = given.model.embed_tokens, given.model.layers, given.lm_head
        self.rotary_emb, self.config = given.model.rotary_emb, given.config

    def forward(self, input_ids, attention_mask, narrower):
        hidden = self.embed(input_ids)
        turns = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=attention_mask, position_embeddings=turns)
            narrower(attention_mask)
        return self.head(hidden)


def documents(*lengths: int) -> torch.Tensor:
    return torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()


def narrowed(pairs, form):
    """(a mask, what makes it narrower in place, from layer to layer)."""
    base, left = pairs[1:].clone() if form == "of one row" else pairs.clone(), [documents(3, 3), documents(2, 1, 3)]
    mask = base if form == "whole" else base.expand(2, -1, -1, -1)
    return mask, lambda _: base.logical_and_(left.pop(0)) if left else None


@pytest.mark.parametrize("form", ["whole", "a view", "of one row"])
@pytest.mark.parametrize("lengths", [(6, 6), (4, 6)], ids=str)
def test_a_mask_that_is_written_to_between_two_layers(form, lengths):
    """Each layer sees shorter documents than the one before it, whatever was known of the mask."""
    model, reference = pair(Between)
    batch, pairs = zoo.batch(length=6), of_pairs(lengths_mask(*lengths))

    def loss(m):
        logits = m(batch["input_ids"], *narrowed(pairs, form))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    for _ in range(3):
        if form == "of one row":  # written out for all rows, in memory of its own
            assert_same_run(model, reference, loss)
            continue
        made = loss(model)
        torch.testing.assert_close(made, loss(reference))
        with pytest.raises(
            RuntimeError, match="modified by an inplace operation"
        ):  # compiled layers keep it, not a copy
            made.backward()
