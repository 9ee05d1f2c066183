"""Adapters that are switched off are scaled by 0 where a reference is scored, and nowhere else."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.models.pairs import attending, pair
from tunecompile.integrations.peft.reference import SwitchedOff

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def adapted(**options) -> nn.Module:
    return zoo.adapt(nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)), task_type=None, **options).train()


def linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def state(model: nn.Module) -> list[tuple]:
    return [(each.disable_adapters, dict(each.scaling)) for each in linears(model)]


def test_they_add_nothing_and_are_as_before_afterwards():
    model, x = adapted(), torch.randn(4, 6)
    trained, off = model(x), SwitchedOff.of(model)
    with off.scaled_by_0() as scaled:
        assert not scaled and torch.equal(model(x), trained)  # they are on
    with model.disable_adapter():
        before, expected = state(model), model(x)
        with off.scaled_by_0() as scaled:
            assert scaled and state(model) == [(False, {"default": 0.0})] * 2
            assert torch.equal(model(x), expected)
        assert state(model) == before
        with pytest.raises(KeyError), off.scaled_by_0():
            raise KeyError
        assert state(model) == before
    assert torch.equal(model(x), trained)


def names(model: nn.Module, *active: str) -> None:
    for each in linears(model):
        each._active_adapter = list(active)


def merged(model: nn.Module) -> None:
    model.base_model.merge_adapter()


def of_fp16(model: nn.Module) -> None:
    model.half()


@pytest.mark.parametrize(
    "options, change",
    [
        (dict(lora_dropout=0.1), None),  # it draws, which a reference does not
        (dict(use_dora=True), None),  # its magnitudes differ from the base's
        ({}, merged),  # PEFT takes them out of the weights
        ({}, of_fp16),  # 0 times infinity is no number
        ({}, lambda model: names(model)),
        ({}, lambda model: names(model, "other")),
    ],
    ids=["dropout", "dora", "merged", "fp16", "none active", "unknown"],
)
def test_others_stay_off(options, change):
    model = adapted(**options)
    if change is not None:
        change(model)
    with model.disable_adapter():
        before = state(model)
        with SwitchedOff.of(model).scaled_by_0() as scaled:
            assert not scaled and state(model) == before


def test_fp16_by_autocast():
    model = adapted()
    with model.disable_adapter(), torch.autocast("cpu", torch.float16), SwitchedOff.of(model).scaled_by_0() as scaled:
        assert not scaled
    with model.disable_adapter(), torch.autocast("cpu", torch.bfloat16), SwitchedOff.of(model).scaled_by_0() as scaled:
        assert scaled


def test_one_adapter_of_two():
    """All that are active are scaled; the others' numbers are not looked at."""
    from peft import LoraConfig

    model, x = adapted(), torch.randn(4, 6)
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5))
    with model.disable_adapter():
        expected = model(x)
        with SwitchedOff.of(model).scaled_by_0() as scaled:
            assert scaled and torch.equal(model(x), expected)


def test_removed_modules_are_freed():
    model = adapted()
    off, gone = SwitchedOff.of(model), weakref.ref(linears(model)[0])
    model.base_model.model[0] = nn.Linear(6, 5)
    gc.collect()
    assert gone() is None
    with model.disable_adapter(), off.scaled_by_0() as scaled:
        assert scaled  # the other one


def test_a_reference_runs_the_products_that_train():
    model, plain = pair(lambda: zoo.adapt(attending()))
    for each in (model, plain):
        zoo.step(each, zoo.batch())
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        scores = [each(zoo.batch()["input_ids"], use_cache=False).logits for each in (model, plain)]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
    found = {
        way if isinstance(way, str) else "training": [
            (tally.family, tally.found) for context in variant.contexts for tally in context.tallies
        ]
        for region in model._tunecompile.regions
        for (way, _), variant in region.variants.items()
    }
    assert found["without_adapters"] == found["training"] and ("lora", 4) in found["training"]
    with model.disable_adapter():
        assert [each for each, _ in state(model)] == [True] * len(linears(model))
