"""Logits that are read when the head has changed."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import of_plain_layers, pair
from tests.support.notes import has

pytestmark = pytest.mark.filterwarnings("ignore")


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad


def read_after_the_update(model: nn.Module, seed: int) -> torch.Tensor:
    model.zero_grad()
    out = model(**zoo.batch(seed=seed))
    out.loss.backward()
    update(model)
    return out.logits.detach()


@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logits_that_are_read_after_the_optimizers_step(frozen, caplog):
    """Those of the first step cannot be made any more, which is told; those of later steps are right."""
    model, reference = pair(of_plain_layers)
    for each in (model, reference):
        each.lm_head.requires_grad_(not frozen)
    told = []
    for seed in range(3):
        with caplog.at_level(logging.WARNING):
            found, expected = (read_after_the_update(each, seed) for each in (model, reference))
        told.append(torch.allclose(found, expected, rtol=1e-4, atol=1e-5))
    assert told == [frozen, True, True]
    warned = [record.message for record in caplog.records if "optimizer.step()" in record.message]
    assert len(warned) == (not frozen)
    (head,) = [match for match in tunecompile.report(model).matches if match.family == "linear_cross_entropy"]
    assert has(head.refused, "logits-read-late") == (not frozen)


@pytest.mark.parametrize("use", [pytest.param(torch.logsumexp, marks=pytest.mark.slow), F.cross_entropy])
def test_a_loss_of_such_logits_does_not_train(use):
    model, reference = pair(of_plain_layers)
    labels = zoo.batch()["labels"].flatten()
    for each in (reference, model):
        logits = each(**zoo.batch()).logits
        if use is not F.cross_entropy and each is reference:
            logits.flatten(0, 1)
        with torch.no_grad():
            each.lm_head.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            use(logits.flatten(0, 1), labels if use is F.cross_entropy else -1).mean().backward()
