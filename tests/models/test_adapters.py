"""Adapters that come, go and change after `optimize`."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.models import zoo
from tests.models.test_api import compiled_slots, equal_steps, optimized, small
from tunecompile.errors import NotOptimized

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def lora(**options):
    peft = pytest.importorskip("peft")
    settings = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.LoraConfig(**{**settings, **options})


def twins(model: nn.Module, change) -> tuple[nn.Module, nn.Module]:
    """The model after `change`, and an unoptimized one with the same weights."""
    torch.manual_seed(3)
    changed = change(model) or model
    return changed, copy.deepcopy(changed)


def test_adapter_added_after_optimize():
    from peft import get_peft_model

    base = optimized(small())
    zoo.step(base, zoo.batch())
    model, reference = twins(base, lambda m: get_peft_model(m, lora()))
    assert not compiled_slots(reference)
    equal_steps(model, reference)
    found = {m.family: (m.found, m.rewritten) for m in tunecompile.report(model).matches}
    assert found["lora"] == (3, 3) and found["linear_cross_entropy"] == (1, 1)
    assert tunecompile.optimize(model) is model and len(compiled_slots(model)) == 4
    assert tunecompile.restore(model) is model and not compiled_slots(model)
    with pytest.raises(NotOptimized):
        tunecompile.report(base)
    merged, expected = (m.merge_and_unload().eval()(zoo.batch()["input_ids"]).logits for m in (model, reference))
    assert torch.allclose(merged, expected, atol=1e-5)


def test_adapters_are_switched_disabled_and_deleted():
    from peft import get_peft_model

    model = get_peft_model(small(), lora())
    torch.manual_seed(4)
    model.add_adapter("other", lora(r=2, target_modules=["k_proj", "v_proj"]))
    reference = copy.deepcopy(model)
    optimized(model)
    equal_steps(model, reference)
    for m in (model, reference):
        m.set_adapter("other")
    equal_steps(model, reference)
    with torch.no_grad(), model.disable_adapter(), reference.disable_adapter():  # DPO's reference model
        ours, theirs = (m(zoo.batch()["input_ids"]).logits for m in (model, reference))
        assert torch.equal(ours, theirs)
    for m in (model, reference):
        m.base_model.set_adapter(["default", "other"])
    equal_steps(model, reference)
    for m in (model, reference):
        m.set_adapter("default")
        m.delete_adapter("other")
    equal_steps(model, reference)
    assert not [note for note in tunecompile.report(model).notes if "eagerly" in note]
    found = {m.family: (m.found, m.rewritten) for m in tunecompile.report(model).matches}
    assert found["lora"] == (3, 3)


def test_gradients_with_the_adapter_disabled():
    from peft import get_peft_model

    model = get_peft_model(small(), lora(modules_to_save=["embed_tokens"]))
    reference = copy.deepcopy(model)
    optimized(model)
    with model.disable_adapter(), reference.disable_adapter():
        for m in (model, reference):
            m.base_model.model.model.norm.weight.requires_grad_(True)
        equal_steps(model, reference)
    equal_steps(model, reference)


@pytest.mark.parametrize("options, kind", [({"modules_to_save": ["lm_head"]}, "ModulesToSaveWrapper"),
                                           ({"target_modules": ["q_proj", "lm_head"]}, "Linear")])
def test_an_adapter_on_the_head_is_noticed(options, kind):
    from peft import get_peft_model

    base = optimized(small())
    zoo.step(base, zoo.batch())
    model, reference = twins(base, lambda m: get_peft_model(m, lora(**options)))
    equal_steps(model, reference)
    assert any(f"the head became a {kind}" in note for note in tunecompile.report(model).notes)


def test_adapter_saved_and_loaded(tmp_path):
    from peft import PeftModel, get_peft_model

    model = optimized(get_peft_model(small(), lora()))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for seed in range(2):
        model(**zoo.batch(seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(small(), tmp_path, is_trainable=True)
    assert list(loaded.state_dict()) == list(model.state_dict())
    equal_steps(model, loaded)
    tunecompile.restore(model)
    merged = model.merge_and_unload()
    assert torch.allclose(merged.eval()(zoo.batch()["input_ids"]).logits, loaded.eval()(zoo.batch()["input_ids"]).logits, atol=1e-4)
