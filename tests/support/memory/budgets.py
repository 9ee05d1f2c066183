"""A small model under a memory budget, what it needs without one, and a memory gauge for tests."""

from __future__ import annotations

import functools

import torch

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import attending

LAYERS = 4


def build(memory, dropout=0.0, make=attending, **config):
    model = zoo.adapt(make(num_hidden_layers=LAYERS, **config), lora_dropout=dropout).train()
    return tunecompile.optimize(model, memory=memory, executor="eager") if memory != "eager" else model


def step(model, seed=3, **shape):
    torch.manual_seed(seed)
    loss = model(**zoo.batch(**shape)).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


@functools.cache
def needed(dropout=0.0, make=attending):
    """What a step without a budget would need, by a budget it cannot exceed."""
    model = build("1TiB", dropout, make)
    step(model)
    memory = tunecompile.report(model).memory
    return memory["predicted_peak"] - memory["kept_weights"]
