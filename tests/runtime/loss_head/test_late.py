"""Logits that are read when the head has changed."""

import copy
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


def test_logits_that_are_read_after_the_optimizers_step(caplog):
    """Those of the first step cannot be made any more, which is told; those of later steps are right."""
    model, reference = pair(of_plain_layers)
    for each in (model, reference):
        each.lm_head.requires_grad_(True)
    told = []
    for seed in range(3):
        with caplog.at_level(logging.WARNING):
            found, expected = (read_after_the_update(each, seed) for each in (model, reference))
        told.append(torch.allclose(found, expected, rtol=1e-4, atol=1e-5))
    assert told == [False, True, True]
    warned = [record.message for record in caplog.records if "optimizer.step()" in record.message]
    assert len(warned) == 1
    (head,) = [match for match in tunecompile.report(model).matches if match.family == "linear_cross_entropy"]
    assert has(head.refused, "logits-read-late")


def test_a_loss_of_such_logits_does_not_train():
    model, reference = pair(of_plain_layers)
    labels = zoo.batch()["labels"].flatten()
    for each in (reference, model):
        logits = each(**zoo.batch()).logits

        with torch.no_grad():
            each.lm_head.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            F.cross_entropy(logits.flatten(0, 1), labels).backward()


def two_adapters(**where) -> nn.Module:
    """Both train, and both reach the head."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **where)
    model = peft.get_peft_model(of_plain_layers(), config)
    model.add_adapter("other", config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save.other" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def switched(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    answers = []
    for name in ("default", "other"):
        model.set_adapter(name)
        answers.append(model(input_ids=ids).logits)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default" in name or ".other" in name)
    return answers


def of_other_weights(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    weights = {name: parameter * 1.2 for name, parameter in model.named_parameters()}
    return [torch.func.functional_call(model, weights, (), {"input_ids": ids}).logits]


def with_another_weight(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    before = model(input_ids=ids).logits
    kept = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(kept.detach() * 2)
    after = model(input_ids=ids).logits
    model.lm_head.weight = kept
    return [before, after]


def hooked_since(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    logits = model(input_ids=ids).logits
    model.lm_head.register_forward_hook(lambda module, args, output: output * 3)
    return [logits]


def replaced_since(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    before, kept = model(input_ids=ids).logits, model.lm_head
    model.lm_head = nn.Linear(kept.in_features, kept.out_features, bias=False, dtype=kept.weight.dtype)
    after = model(input_ids=ids).logits
    model.lm_head = kept
    return [before, after.detach()]


@pytest.mark.parametrize(
    "make, answers",
    [
        (lambda: two_adapters(target_modules=["inner", "lm_head"]), switched),
        (lambda: two_adapters(target_modules=["inner"], modules_to_save=["lm_head"]), switched),
        (of_plain_layers, of_other_weights),
        (of_plain_layers, with_another_weight),
        (of_plain_layers, hooked_since),
        (of_plain_layers, replaced_since),
    ],
)
def test_logits_are_those_of_their_call(make, answers):
    """Meanwhile the head has another adapter or another weight, a hook, or is another module."""
    found = []
    torch.manual_seed(0)
    reference = make().double().train()
    for model in (tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference):
        torch.manual_seed(0)
        for number in range(2):
            model.zero_grad()
            torch.manual_seed(number)
            loss = sum(
                each.log_softmax(-1)[..., 3].mean() for each in answers(model, zoo.batch(seed=number)["input_ids"])
            )
            loss.backward()
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (loss, ours), (expected, theirs) = found
    assert loss == pytest.approx(expected, rel=1e-9) and ours.keys() == theirs.keys()
    assert max(zoo.errors(ours, theirs).values()) < 1e-8
