"""Checkpoints around layers with states, on packed rows: what is repeated in the backward pass is what was run."""

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.support import zoo
from tests.support.batches import documents, padded
from tests.support.compare import assert_close
from tests.support.models import hybrids
from tests.support.models.pairs import optimized
from tests.support.notes import has
from tests.support.reports import told_apart

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
HYBRID = {"layer_types": ["mamba", "attention"] * 2}
LIMITS = {"limit": 1e-3, "floor": 1e-3}


def layers_of(model):
    return model.backbone.layers if hasattr(model, "backbone") else model.model.layers


def enabled(model, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def called(model, reentrant):
    """The user's own code calls each layer by a checkpoint: the layer does not know."""
    kinds = {}
    for layer in layers_of(model):
        kind = type(layer)

        def call(self, hidden, *args, _kind=kind, **kwargs):
            return checkpoint(lambda x: _kind.__call__(self, x, *args, **kwargs), hidden, use_reentrant=reentrant)

        members = {"__module__": kind.__module__, "__call__": call}
        layer.__class__ = kinds.setdefault(kind, type(kind.__name__, (kind,), members))


def wrapped(model, reentrant):
    """torch's own wrapper, which FSDP's users put around layers."""
    kind, layers = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT, layers_of(model)
    for place, layer in enumerate(layers):
        layers[place] = checkpoint_wrapper(layer, kind)


def checkpointed(model, way, reentrant):
    model = copy.deepcopy(model)
    way(model, reentrant)
    if reentrant:
        model.enable_input_require_grads()
    return model


def step(model, batch):
    loss, gradients = zoo.step(model, batch)
    return loss, {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients.items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", [enabled, called, wrapped])
@pytest.mark.parametrize("reentrant", [False, True])
def test_documents_are_each_by_themselves(way, reentrant):
    """A repetition that decides otherwise has gradients of another function."""
    plain = hybrids.make("granite_hybrid", torch.float32, **HYBRID)
    row, rows = documents(5, 41, 1, 30)
    model = optimized(checkpointed(plain, way, reentrant))
    assert_close(step(model, row), step(plain, rows), **LIMITS)
    assert told_apart(model) == 1 and not has(model, "packing-kept")


def test_bounds_that_only_the_model_knows():
    """A repetition cannot know them: states cross, as in eager, and the report says so. (Its gradients were off by 4.)"""
    plain = hybrids.make("mamba2", torch.float32, num_hidden_layers=2)
    row, _ = documents(5, 41, 1, 30)
    model = optimized(checkpointed(plain, called, True))
    assert_close(step(model, row), step(checkpointed(plain, called, True), row), **LIMITS)
    assert has(model, "bounds-not-handed-on", subject="Mamba2Block")


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_batches_before_one_backward(reentrant):
    """The first is repeated when another one, of other documents and with padding, has been decided."""
    plain = hybrids.make("granite_hybrid", torch.float32, **HYBRID)
    (row, rows), other = documents(5, 41, 1, 30), padded(4, 60)
    model = optimized(checkpointed(plain, called, reentrant))
    (model(**row).loss + model(**other).loss).backward()
    expected = [step(plain, batch)[1] for batch in (rows, other)]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, sum(each[name] for each in expected), rtol=1e-3, atol=1e-5)
