"""Policies and references on a GPU: with equal weights their log-probabilities are the same bits."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.support.batches import padded
from tests.support.models.gpu import build
from tests.support.notes import EAGER, find

pytestmark = pytest.mark.gpu


def log_probs(model: nn.Module, inputs: dict) -> torch.Tensor:
    """As trainers take them of logits."""
    logits = model(**inputs).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    return chosen * inputs["attention_mask"][:, 1:]


def fresh(model: nn.Module) -> None:
    """Adapters that have learnt nothing yet."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()


WIDE = dict(hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=4, head_dim=128)


@pytest.mark.parametrize("widths", [{}, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16"])
@pytest.mark.parametrize("mode", ["qlora", "lora"])
def test_a_policy_its_old_self_and_its_reference(mode, autocast, widths):
    model = build("llama", mode, **widths)
    fresh(model)
    tunecompile.optimize(model)
    for rows, length, seed in ((4, 200, 1), (4, 200, 2), (8, 1000, 3)):
        made = padded(rows, length, seed=seed, device="cuda", vocabulary=4099)
        inputs = {name: made[name] for name in ("input_ids", "attention_mask")} | {"use_cache": False}
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            with torch.no_grad():
                old = log_probs(model, inputs)
                with model.disable_adapter():
                    reference = log_probs(model, inputs)
            policy = log_probs(model, inputs)
        policy.sum().backward()
        assert policy.abs().max() > 1 and torch.equal(old, policy)
        assert torch.equal(reference, policy), (reference - policy).abs().max()
    assert not find(model, *EAGER), tunecompile.report(model)


def fused_scores(model: nn.Module, inputs: dict) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return model(**inputs, fused_lm_head=True).log_probs


@torch.no_grad()
def old_and_reference(model: nn.Module, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    old = fused_scores(model, inputs)
    with model.disable_adapter():
        return old, fused_scores(model, inputs)


@pytest.mark.parametrize("first", ["old", "policy"])
def test_under_the_head_of_trl(first):
    """Rows without padding, of the widths of an 8B: code that is generated of another graph rounds some tokens otherwise."""
    utils = pytest.importorskip("trl.trainer.utils")
    model = build("llama", "qlora", **WIDE | dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32))
    fresh(model)
    utils.add_fused_lm_head(model.get_base_model())
    tunecompile.optimize(model)
    for seed in range(2):
        made = padded(8, 1000, seed=seed, device="cuda", vocabulary=4099)
        inputs = {name: made[name] for name in ("input_ids", "attention_mask", "labels")} | {"use_cache": False}
        before = old_and_reference(model, inputs)
        policy = fused_scores(model, inputs)
        old, reference = before if first == "old" else old_and_reference(model, inputs)
        policy.sum().backward()
        assert torch.equal(old, policy) and torch.equal(reference, policy), (reference - policy).abs().max()
    assert find(model, "padding-removed") and not find(model, *EAGER), tunecompile.report(model)
