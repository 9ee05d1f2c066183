"""Autograd functions of the user's own that take deferred logits, as the kernels of TRL and Liger do."""

import gc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F

from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.losses import LogSoftmax, Weaker
from tests.support.models.pairs import of_plain_layers, pair

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


class Same(Weaker):
    """Returns what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x


@pytest.mark.parametrize("function", [LogSoftmax, Weaker, Same])
def test_an_autograd_function_takes_logits(function):
    """Its gradient reaches the model, by its own backward."""
    model, reference = pair(of_plain_layers)

    def run(m):
        logits = m(zoo.batch()["input_ids"]).logits
        found = function.apply(part(logits))
        own = F.cross_entropy(found.flatten(0, 1), zoo.batch()["labels"][:, : found.shape[1]].flatten())
        return found.square().mean() + own + F.cross_entropy(logits.flatten(0, 1), zoo.batch()["labels"].flatten())

    for part in (lambda logits: logits, lambda logits: logits[:, :-1] * 0.5, lambda logits: logits.clone().div_(0.7)):
        assert_same_run(model, reference, run)


def test_it_takes_what_is_taken_of_each_row():
    model, reference = pair(of_plain_layers)

    def run(m):
        logits, labels = m(zoo.batch()["input_ids"]).logits, zoo.batch()["labels"].clamp(min=0)[..., None]
        return (
            Weaker.apply(logits.logsumexp(-1)).square().mean()
            + Same.apply(logits[0].log_softmax(-1).gather(-1, labels[0])).sum()
            + logits.gather(-1, labels).mean()
        )

    assert_same_run(model, reference, run)


def test_weights_that_change_before_the_backward_pass_are_an_error():
    model, _ = pair(of_plain_layers)
    loss = Weaker.apply(model(zoo.batch()["input_ids"]).logits).square().mean()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_a_second_derivative_is_refused():
    model, _ = pair(of_plain_layers)
    loss = Weaker.apply(model(zoo.batch()["input_ids"]).logits).square().mean()
    (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.square().sum().backward()


@pytest.mark.slow
def test_a_compiled_function_takes_logits(monkeypatch):
    """Without complaints of what Dynamo leaves half made."""
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: complaints.append(str(told.exc_value)))
    model, reference = pair(of_plain_layers)
    loss = torch.compile(
        lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()), backend="eager"
    )
    assert_same_run(model, reference, lambda m: loss(m(zoo.batch()["input_ids"]).logits, zoo.batch()["labels"]))
    gc.collect()
    assert complaints == []


def test_logits_are_freed_with_their_last_name():
    model, _ = pair(of_plain_layers)
    gc.collect()
    gc.disable()
    try:
        logits = model(zoo.batch()["input_ids"]).logits
        view = logits[:, :-1].div_(0.7)
        each, _ = view.log_softmax(-1), view.argmax(-1)
        seen = [weakref.ref(thing) for thing in (view.recipe, each.recipe, view.recipe.real, logits.recipe.real)]
        del logits, view, each
        assert not any(ref() is not None for ref in seen)
    finally:
        gc.enable()
