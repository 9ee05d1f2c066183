"""Hybrids under adapters with dropout in an accumulated step of a padded batch and a packed row, and what is found there."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.models import golden
from tests.support import zoo
from tests.support.batches import documents, padded
from tests.support.compare import assert_close
from tests.support.models import hybrids
from tests.support.models.pairs import optimized
from tests.support.notes import fell_back
from tests.support.reports import flattened, told_apart

pytest.importorskip("peft")
KEPT = 1e-9  #: so little dropout that none of these numbers falls: others are drawn where there is no padding


def accumulated(model, batches):
    """(Sum of losses, gradients.)"""
    model.train().zero_grad(set_to_none=True)
    losses = [model(**batch).loss for batch in batches]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def adapted(family: str) -> nn.Module:
    """PEFT's adapters of experts have no dropout."""
    if not hybrids.is_there(family):
        pytest.skip("this version of transformers has no such model")
    model = hybrids.make(family, torch.float32, **hybrids.ONE_OF_EACH.get(family, {}))
    return hybrids.adapt(model, lora_dropout=0.0 if family in hybrids.ADAPTED_EXPERTS else KEPT)


def set_dropout(model: nn.Module, p: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p == KEPT:
            module.p = p


@pytest.mark.slow
@pytest.mark.parametrize("family", hybrids.HYBRIDS)
def test_padding_packing_accumulation_and_dropout(family):
    reference, (row, rows) = adapted(family), documents(5, 41, 1, 30)
    model = optimized(copy.deepcopy(reference))
    loss, ours = accumulated(model, [padded(3, 30), row])
    set_dropout(reference, 0.0)
    expected, theirs = accumulated(reference, [padded(3, 30), rows])
    assert loss == pytest.approx(expected, rel=1e-5)
    errors = zoo.errors(ours, theirs, 1e-3)
    assert max(errors.values()) < 1e-4, max(errors, key=errors.__getitem__)
    assert flattened(model) == told_apart(model) == 1 and not fell_back(model)
    found = {each.family: (each.found, each.rewritten) for each in tunecompile.report(model).matches if each.found}
    assert found == golden.HYBRIDS[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "mamba", "lfm2"])  # one of each rule
def test_generated_code_in_three_lengths(family):
    kinds = {"qwen3_5": ["linear_attention"] * 2, "lfm2": ["conv"] * 2}
    layers = {"layer_types": kinds[family]} if family in kinds else {}
    reference = hybrids.make(family, torch.float32, num_hidden_layers=2, use_cache=False, **layers)
    model = tunecompile.optimize(copy.deepcopy(reference))
    for length in (64, 40, 52):
        batch = zoo.batch(length=length)
        assert_close(zoo.step(model, batch), zoo.step(reference, batch), limit=1e-3, floor=1e-3)
    assert [region.compiles for region in tunecompile.report(model).regions] == [2]


def test_every_hybrid_has_a_row():
    assert set(golden.HYBRIDS) == set(hybrids.HYBRIDS)
