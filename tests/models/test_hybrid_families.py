"""Hybrids under adapters in an accumulated step of a padded batch and a packed row, and with dropout."""

import copy

import pytest
import torch

from tests.support import zoo
from tests.support.batches import documents, padded
from tests.support.models import hybrids
from tests.support.models.pairs import optimized
from tests.support.notes import fell_back
from tests.support.reports import flattened, told_apart

pytest.importorskip("peft")


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
    model, (row, rows) = optimized(copy.deepcopy(reference)), documents(5, 41, 1, 30)
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
