"""Adapters that come, go and change after `optimize`."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_close, assert_same_step
from tests.support.models.pairs import attending, compiled_slots, optimized, small
from tests.support.notes import EAGER, find, has
from tunecompile.errors import NotOptimized

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def lora(**options):
    peft = pytest.importorskip("peft")
    settings = dict(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "up_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
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
    assert_same_step(model, reference)
    found = {m.family: (m.found, m.rewritten) for m in tunecompile.report(model).matches}
    assert found["lora"] == (3, 3) and found["linear_cross_entropy"] == (1, 1)
    assert tunecompile.optimize(model) is model and len(compiled_slots(model)) == 5
    assert tunecompile.restore(model) is model and not compiled_slots(model)
    with pytest.raises(NotOptimized):
        tunecompile.report(base)
    merged, expected = (m.merge_and_unload().eval()(zoo.batch()["input_ids"]).logits for m in (model, reference))
    assert torch.allclose(merged, expected, atol=1e-5)


class Multiplied(nn.Module):
    """An adapter that is no part of the model and takes its linear's place, as kohya's scripts and their kin have it."""

    def __init__(self, linear, rank=2, alpha=1.0):
        super().__init__()
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        self.multiplier, self.scale = 1.0, alpha / rank
        self.linear, linear.forward = linear.forward, self.forward

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x)) * self.multiplier * self.scale


def test_adapters_outside_the_model():
    def trained(optimize: bool):
        model = attending().requires_grad_(False)
        linears = [module for path, module in model.named_modules() if path.endswith("q_proj")]
        adapters = nn.ModuleList([Multiplied(linear) for linear in linears])
        loss, _ = zoo.step(optimized(model) if optimize else model, zoo.batch())
        return (loss, {name: each.grad for name, each in adapters.named_parameters()}), model

    (expected, _), (ours, model) = trained(False), trained(True)
    assert_close(ours, expected)
    assert {m.family: m.rewritten for m in tunecompile.report(model).matches}["lora"] == 1


@pytest.mark.slow
def test_adapters_are_switched_disabled_and_deleted():
    from peft import get_peft_model

    model = get_peft_model(small(), lora())
    torch.manual_seed(4)
    model.add_adapter("other", lora(r=2, target_modules=["k_proj", "v_proj"]))
    reference = copy.deepcopy(model)
    optimized(model)
    assert_same_step(model, reference)
    for m in (model, reference):
        m.set_adapter("other")
    assert_same_step(model, reference)
    with torch.no_grad(), model.disable_adapter(), reference.disable_adapter():  # DPO's reference model
        ours, theirs = (m(zoo.batch()["input_ids"]).logits for m in (model, reference))
        assert torch.equal(ours, theirs)
    for m in (model, reference):
        m.base_model.set_adapter(["default", "other"])
    assert_same_step(model, reference)
    for m in (model, reference):
        m.set_adapter("default")
        m.delete_adapter("other")
    assert_same_step(model, reference)
    assert not find(model, *EAGER)
    found = {m.family: (m.found, m.rewritten) for m in tunecompile.report(model).matches}
    assert found["lora"] == (3, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, kind",
    [
        ({"modules_to_save": ["lm_head"]}, "ModulesToSaveWrapper"),
        ({"target_modules": ["q_proj", "lm_head"]}, "Linear"),
    ],
)
def test_an_adapter_on_the_head_is_noticed(options, kind):
    from peft import get_peft_model

    base = optimized(small())
    zoo.step(base, zoo.batch())
    model, reference = twins(base, lambda m: get_peft_model(m, lora(**options)))
    assert_same_step(model, reference)
    assert has(model, "head-replaced", subject=kind)


def test_loss_without_logits_under_an_adapter_on_the_head():
    """Whatever module the head has become, if it multiplies by a weight and an adapter's two matrices."""
    from peft import get_peft_model

    base = get_peft_model(attending(), lora(target_modules=["lm_head"], use_rslora=True))
    torch.manual_seed(1)
    for name, p in base.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    model, reference = optimized(copy.deepcopy(base)), base
    for seed in range(3):
        batch = zoo.batch(rows=seed + 1, seed=seed)
        (loss, ours), (expected, theirs) = zoo.step(model, batch), zoo.step(reference, batch)
        assert ours.keys() == theirs.keys()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and max(zoo.errors(ours, theirs).values()) < 1e-4
    tally = next(m for m in tunecompile.report(model).matches if m.family == "linear_cross_entropy")
    assert tally.rewritten == 1, tally


def test_another_adapter_on_the_head_is_read_anew():
    from peft import get_peft_model

    base = get_peft_model(small(), lora(target_modules=["lm_head"]))
    base.add_adapter("other", lora(target_modules=["lm_head"], r=6))
    torch.manual_seed(1)
    for name, p in base.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.05)
    model, reference = optimized(copy.deepcopy(base)), base
    for name in ("default", "other", "default"):
        for m in (model, reference):
            m.set_adapter(name)
        assert_same_step(model, reference)
    assert "Linear" not in str([m.refused for m in tunecompile.report(model).matches])


def test_a_head_under_another_autocast_than_its_loss():
    from peft import get_peft_model

    base = get_peft_model(small(), lora(target_modules=["lm_head"]))
    model, reference = optimized(copy.deepcopy(base)), base
    losses = []
    for m in (model, reference):
        m.train()
        batch = zoo.batch()
        logits = m(input_ids=batch["input_ids"]).logits
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


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
    assert_same_step(model, loaded)
    tunecompile.restore(model)
    merged = model.merge_and_unload()
    assert torch.allclose(
        merged.eval()(zoo.batch()["input_ids"]).logits, loaded.eval()(zoo.batch()["input_ids"]).logits, atol=1e-4
    )
