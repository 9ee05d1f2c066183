"""Layers with delta rules and convolutions run without padding, and nothing goes from one document to another."""

import copy
import functools

import pytest
import torch

from tests.support import zoo
from tests.support.batches import documents, packed, padded
from tests.support.compare import assert_close
from tests.support.models import hybrids
from tests.support.models.pairs import optimized, without_mlps
from tests.support.notes import fell_back, has
from tests.support.reports import flattened, told_apart

pytest.importorskip("transformers.models.qwen3_5")
LIMITS = {"loss": 1e-6, "limit": 1e-4, "floor": 1e-4}  #: transformers' rule is in fp32


@functools.cache
def models(*kinds):
    """(As it was, optimized), with these layers."""
    made = hybrids.make("qwen3_5", num_hidden_layers=len(kinds), layer_types=list(kinds), use_cache=False)
    reference = without_mlps(made)
    return reference, optimized(copy.deepcopy(reference))


BOTH = ("linear_attention", "full_attention")


@pytest.fixture
def pair():
    return models(*BOTH)


def test_padding_is_removed():
    reference, model = models("linear_attention", "linear_attention")
    before, batch = flattened(model), padded(4, 90)
    assert_close(zoo.step(model, batch), zoo.step(reference, batch), **LIMITS)
    assert flattened(model) == before + 1 and not fell_back(model)


@pytest.mark.slow
def test_documents_that_only_positions_tell_of(pair):
    """As the model's own code has it, and the report says so."""
    reference, model = pair
    model = optimized(copy.deepcopy(reference))
    batch = {**packed((5, 67, 30)), "use_cache": False}
    assert_close(zoo.step(model, batch), zoo.step(reference, batch), **LIMITS)
    assert has(model, "states-cross-documents", subject="Qwen3_5DecoderLayer")


def test_bounds_that_a_model_keeps_from_its_layers():
    """Mamba's code for the loss hands nothing on: states cross in eager, and where no bounds are given."""
    reference = hybrids.make("mamba2", torch.float32, num_hidden_layers=2)
    model = optimized(copy.deepcopy(reference))
    row, rows = documents(5, 21, 1, 10)
    assert_close(zoo.step(model, row), zoo.step(reference, rows), limit=1e-3, floor=1e-3)
    assert told_apart(model) == 1 and not has(model, "bounds-not-handed-on")


@pytest.mark.slow
def test_a_model_that_knows_positions_alone_and_keeps_them_from_its_layers():
    reference = hybrids.make("mamba2", torch.float32, num_hidden_layers=2)
    model, batch = optimized(copy.deepcopy(reference)), packed((5, 21, 10))
    assert_close(zoo.step(model, batch), zoo.step(reference, batch), limit=1e-3, floor=1e-3)
    assert has(model, "bounds-not-handed-on", subject="Mamba2Block") and not has(model, "packing-kept")
