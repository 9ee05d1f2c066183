"""A small model with adapters for `tunecompile.verify`, and what it says of one."""

from __future__ import annotations

import torch
from torch import nn

import tunecompile
from tests.support import zoo


class Through(nn.Module):
    """In the place of attention, for tests that say nothing of it: trials take half as long."""

    def forward(self, hidden_states, **_):
        return hidden_states, None


def build(family="llama", mode="lora", attends=True, **adapter):
    model = zoo.make(family, num_hidden_layers=2)
    for layer in () if attends else model.model.layers:
        layer.self_attn = Through()
    if mode == "full":
        return model.train()
    model = zoo.quantize(model.to(torch.bfloat16), torch.bfloat16) if mode == "qlora" else model
    return zoo.adapt(
        model, **{"target_modules": ["q_proj", "down_proj"] if attends else ["down_proj"], **adapter}
    ).train()


def verified(model, autocast=None, **batch):
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        return tunecompile.verify(tunecompile.optimize(model, executor="eager"), zoo.batch(**batch))
