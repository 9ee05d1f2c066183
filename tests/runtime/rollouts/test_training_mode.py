"""`generate` of a model in training mode, as some trainers call it."""

import copy

import pytest
import torch
from transformers.integrations.neftune import activate_neftune

import tunecompile
from tests.runtime.rollouts.calls import greedy, made, prompts
from tests.runtime.rollouts.recorder import loop_of
from tests.support import zoo

pytestmark = pytest.mark.filterwarnings("ignore")


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return model


def noisy(model):
    activate_neftune(model, 5.0)
    return model


@pytest.mark.parametrize(
    ("build", "subject"),
    [
        (lambda: made(), ""),
        (lambda: zoo.adapt(made()), ""),
        (lambda: zoo.adapt(made(), lora_dropout=0.5), "dropout"),
        (lambda: made(attention_dropout=0.5), "attention_dropout"),
        (lambda: checkpointed(made()), "gradient_checkpointing"),
        (lambda: noisy(made()), "neftune_noise_alpha"),
    ],
    ids=["plain", "lora", "lora dropout", "attention dropout", "checkpoints", "neftune"],
)
def test_what_depends_on_it_is_left(build, subject):
    model = build().train()
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    loop = loop_of(ours)
    found = []
    for each in (model, ours):
        torch.manual_seed(0)
        found.append(each.generate(**prompts(), **greedy()))
        assert each.training
    assert torch.equal(*found) and loop.calls == (not subject)
    assert {why.subject for why in loop.left} == ({subject} if subject else set())
