"""A model that is planned in no time, and a device that is full at chosen points of its step."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support.memory.budgets import LAYERS

FULL = "CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has a total capacity of 1.00 MiB"
WHERE = ("forward", "before the backward", "behind the backward")


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.RMSNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Dropout(0.3),
        )

    def forward(self, x, scale=None):
        return x + self.drop(self.down(F.silu(self.up(self.norm(x)))))


class Backbone(nn.Module):
    def __init__(self, width=16, layers=LAYERS):
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, ids):
        states = [self.embed(ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.norm(states[-1]), tuple(states)


class Tiny(nn.Module):
    """Small enough for plans to be made in no time."""

    def __init__(self, width=16, layers=LAYERS):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = Backbone(width, layers), nn.Linear(width, 32, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids, labels=None):
        logits = self.head(self.backbone(ids)[0])
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def ids(rows=4, seed=1):
    return torch.randint(0, 32, (rows, 8), generator=torch.Generator().manual_seed(seed))


def loss(model, rows=4, seed=1):
    return model(ids(rows, seed), ids(rows, seed).roll(-1, 1))


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def step(model, seed=3):
    torch.manual_seed(seed)
    found = loss(model)
    found.backward()
    return found.detach(), gradients(model)


def build(memory):
    return tunecompile.optimize(Tiny().train(), memory=memory, executor="eager")


@functools.cache
def needed():
    model = build("1TiB")
    step(model)
    return tunecompile.report(model).memory["predicted_peak"]


@functools.cache
def plain():
    return step(build(None))


def guarded(share=1.2):
    """A model that keeps all, just so; run once, so that there is a plan."""
    model = build(int(share * needed()))
    step(model)
    assert tunecompile.report(model).memory["plans"] == [
        {"recompute": [], "tiles": 1, "offload": False, "largest_stays": False, "layers": LAYERS}
    ]
    return model


class Full:
    """Has the device full at chosen points of a layer's next calls: behind its forward, or before or behind its own backward."""

    def __init__(self, model, layer, where, times=1):
        self.slot, self.where, self.left, self.raised = model._tunecompile.slots[layer], where, times, 0
        self.inner, self.slot.compiled = self.slot.compiled, self

    def __call__(self, args, kwargs, finish=lambda output: output):
        if self.where == "behind the backward":
            (args[0] if args else kwargs["hidden_states"]).register_hook(self.strike)
        return self.inner(args, kwargs, lambda output: finish(self.watch(output)))

    def watch(self, output):
        if self.where == "forward":
            self.strike()
        elif self.where == "before the backward":
            output.register_hook(self.strike)
        return output

    def strike(self, _grad=None):
        if self.left:
            self.left -= 1
            self.raised += 1
            raise torch.OutOfMemoryError(FULL)


def recovery(model):
    return model._tunecompile.step.recovery


def graphs(model):
    return sum(call.edges is not None for call in recovery(model).calls)


def peak(model):
    """Of layers, head and loss."""
    return model._tunecompile.step.budget.admitted.choice.peak
