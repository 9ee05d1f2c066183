"""What a compiled step assumes of the world outside its graphs. Each row is changed between two steps, and the next step is
eager's all the same.

How each change is noticed: Dynamo's guards (functions that a layer looks up, attributes, flags of modules, weights' dtypes), the key
of a call (gradients, hooks), a look at each step (modules inside layers, the head, members of module lists, functions of
`torch.nn.functional`), or not at all because the graph takes it as an input (values of weights and buffers).
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.batches import padded
from tests.support.changes import ACTS, SAME
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import pair

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
#: rows of `make test`: any other is noticed in the same way as one of these
QUICK = {"a weight by another"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in ACTS | SAME])
def test_a_change_between_two_steps(name):
    model, reference = pair(lambda: zoo.make("llama", num_hidden_layers=2))
    for m in (model, reference):
        m.train()
    assert_same_flattened(model, reference, padded())
    before = zoo.step(reference, padded())
    with (ACTS | SAME)[name]((model, reference)) or contextlib.nullcontext():
        for seed in (0, 1):
            assert_same_flattened(model, reference, padded(seed=seed))
        if name not in SAME:
            assert _differ(before, zoo.step(reference, padded())), "the change does nothing"
    assert_same_flattened(model, reference, padded())


def _differ(before, after) -> bool:
    (loss, gradients), (now, others) = before, after
    if loss.item() != now.item() or gradients.keys() != others.keys():
        return True
    return any(not torch.equal(gradients[name], others[name]) for name in gradients)


def with_dropout():
    model = zoo.make("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5))
    return model


def test_dropout_of_a_part_that_is_set_to_evaluation():
    model, reference = pair(with_dropout)
    for training in (True, False, True):
        for m in (model, reference):
            m.train()
            for layer in m.model.layers:
                layer.mlp[1].train(training)
        losses = []
        for m in (model, reference):
            torch.manual_seed(3)
            losses.append(m(**zoo.batch()).loss.item())
        assert training or losses[0] == pytest.approx(losses[1], rel=1e-5)
        drops = abs(losses[0] - model.eval()(**zoo.batch()).loss.item()) > 1e-6
        assert drops == training
