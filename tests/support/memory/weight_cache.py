"""Steps of adapted models whose dequantised weights are cached, and a comparison of them."""

from __future__ import annotations

import copy
import dataclasses

import torch

from tests.support import zoo


def kept(model):
    return model._tunecompile.kept


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model, **batch):
    model.zero_grad()
    loss = model(**zoo.batch(**batch)).loss
    loss.backward()
    return loss.detach(), gradients(model)


def add(model, name, **changes):
    """One more adapter, like the first but for `changes`, filled with the same numbers each time."""
    model.add_adapter(name, dataclasses.replace(copy.deepcopy(model.peft_config["default"]), **changes))
    torch.manual_seed(8)
    for parameter_name, p in model.named_parameters():
        if f".{name}." in parameter_name:
            torch.nn.init.normal_(p, std=0.05)


def activate(model, name):
    """Run with this adapter; the other is trained too."""
    model.set_adapter(name)
    for either in ("default", "other"):
        model.set_requires_grad(either)


def accumulated(m):
    m.zero_grad()
    torch.manual_seed(5)
    losses = [m(**zoo.batch(seed=seed)).loss for seed in (1, 2)]  # both before their backwards
    sum(losses).backward()
    return sum(losses).detach(), gradients(m)


def interleaved(m):
    """Another adapter's forward runs before the backward of the first."""
    m.zero_grad()
    losses = []
    for name in ("default", "other"):
        activate(m, name)
        losses.append(m(**zoo.batch()).loss)
    (losses[0] + 2 * losses[1]).backward()
    return losses[0].detach(), gradients(m)


def assert_same_by_element(model, reference, run=step):
    """Gradients element by element: a stale weight changes few."""
    (loss, ours), (expected, theirs) = run(model), run(reference)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-6, msg=name)
