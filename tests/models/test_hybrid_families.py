"""Hybrids under adapters in an accumulated step of a padded batch and a packed row, and with dropout."""

import copy

import pytest
import torch

from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.models import hybrids
from tests.support.models.pairs import optimized
from tests.support.notes import fell_back
from tests.support.reports import flattened, told_apart

pytest.importorskip("peft")
LENGTHS = (5, 41, 1, 30)


def of_documents():
    """(A packed row with its bounds, the same documents as rows.)"""
    row, longest = packed(LENGTHS), max(LENGTHS)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    ids = torch.nn.utils.rnn.pad_sequence(row["input_ids"][0].split(LENGTHS), batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(row["labels"][0].split(LENGTHS), batch_first=True, padding_value=-100)
    mask = (torch.arange(longest) < torch.tensor(LENGTHS)[:, None]).long()
    return {**row, **bounds, "use_cache": False}, {"input_ids": ids, "labels": labels, "attention_mask": mask}


def accumulated(model, batches):
    """(Sum of losses, gradients.)"""
    model.train().zero_grad(set_to_none=True)
    losses = [model(**batch).loss for batch in batches]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo_hybrid", "kimi_linear"])
def test_padding_packing_accumulation_and_dropout(family):
    pytest.importorskip(f"transformers.models.{family}")
    reference = hybrids.adapt(hybrids.make(family, torch.float32), lora_dropout=0.25)
    drops = [module for module in reference.modules() if isinstance(module, torch.nn.Dropout) and module.p == 0.25]
    for module in drops:
        module.p = 0.0  # random numbers are drawn for other tokens where there is no padding
    model, (row, rows) = optimized(copy.deepcopy(reference)), of_documents()
    loss, ours = accumulated(model, [padded(3, 40), row])
    expected, theirs = accumulated(reference, [padded(3, 40), rows])
    assert loss == pytest.approx(expected, rel=1e-5)
    errors = zoo.errors(ours, theirs, 1e-3)
    assert max(errors.values()) < 1e-4, max(errors, key=errors.__getitem__)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.25
    loss, ours = accumulated(model, [padded(3, 40), row])
    assert loss == pytest.approx(expected, rel=0.1) and all(gradient.isfinite().all() for gradient in ours.values())
    assert flattened(model) == told_apart(model) == 2 and not fell_back(model)
