"""How steps and layers run, by tables. No model runs."""

from itertools import product

import pytest
import torch
from torch import nn

from tunecompile.runtime.step import facts as module
from tunecompile.runtime.step.facts import read_facts
from tunecompile.runtime.step.mode import Mode, StepFacts, mode_again, mode_of_layer, mode_of_step

EAGER, TRAIN, SCORE, EVALUATE = Mode
BOOLS = (False, True)


def test_training_steps_have_gradients_and_are_traced_by_nobody():
    for training, gradients, traced, elsewhere, scores, evaluates in product(BOOLS, repeat=6):
        mode = mode_of_step(StepFacts(training, gradients, traced, elsewhere, scores, evaluates))
        assert (mode is TRAIN) is (training and gradients and not traced)


@pytest.mark.parametrize(
    "facts, mode",
    [
        (dict(training=True, scores=True), SCORE),
        (dict(training=True, scores=False), EAGER),  # it generates
        (dict(training=True, scores=False, evaluates=True), EAGER),
        (dict(training=False, evaluates=True), EVALUATE),
        (dict(training=False, evaluates=False), EAGER),
        (dict(training=False, scores=True), EAGER),
        (dict(training=True, scores=True, elsewhere=True), EAGER),
        (dict(training=False, evaluates=True, elsewhere=True), EAGER),
        (dict(training=True, scores=True, traced=True), EAGER),
        (dict(training=False, evaluates=True, traced=True), EAGER),
    ],
)
def test_forwards_without_gradients(facts, mode):
    assert mode_of_step(StepFacts(gradients=False, **facts)) is mode


@pytest.mark.parametrize(
    "step, training, gradients, mode",
    [
        *((EAGER, *each, EAGER) for each in product(BOOLS, repeat=2)),
        *((TRAIN, *each, TRAIN) for each in product(BOOLS, repeat=2)),  # frozen ones, and a re-entrant checkpoint's
        (SCORE, True, False, SCORE),
        (SCORE, False, False, EAGER),  # a module in eval mode in a model that trains
        (SCORE, True, True, EAGER),
        (EVALUATE, False, False, EVALUATE),
        (EVALUATE, True, False, EVALUATE),
        (EVALUATE, False, True, EAGER),
    ],
)
def test_layers_run_as_their_step(step, training, gradients, mode):
    assert mode_of_layer(step, training, gradients) is mode


def test_what_a_checkpoint_repeats_runs_as_it_did():
    for ran, training, gradients in product(Mode, BOOLS, BOOLS):
        again = mode_again(ran, training, gradients)
        assert again is (TRAIN if training and gradients and ran is not EAGER else EAGER)


class Owner(nn.Module):
    def forward(self, x, use_cache=None):
        return x


@pytest.mark.parametrize("training, gradients, elsewhere", product(BOOLS, repeat=3))
def test_what_is_read_of_a_call(training, gradients, elsewhere):
    """Whether it is an evaluation is found out by looking at callers, and only where it can be one."""
    owner, asked = Owner().train(training), []

    def read(**kwargs):
        return read_facts(owner, (1,), kwargs, elsewhere, lambda: asked.append(1) or True)

    with torch.set_grad_enabled(gradients):
        found, generates = read(use_cache=False), read(use_cache=True)
    alone = not gradients and not elsewhere
    assert (found.training, found.gradients, found.traced, found.elsewhere) == (training, gradients, False, elsewhere)
    assert found.scores is (alone and training) and not generates.scores
    assert found.evaluates is (alone and not training) is bool(asked)


def test_what_others_trace_is_none_of_ours(monkeypatch):
    monkeypatch.setattr(module, "others_trace", lambda: True)
    with torch.no_grad():
        found = read_facts(Owner(), (1,), {"use_cache": False})
    assert found.traced and not found.scores and mode_of_step(found) is EAGER
