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
    for rows, length, seed in ((4, 200, 1), (4, 200, 2), (2, 333, 3)):
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
