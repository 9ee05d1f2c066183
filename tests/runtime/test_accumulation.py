"""What accumulated batches would take at once, from the times of batches that are made up, and in the report of a model."""

import random

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import adapted_layers
from tests.support.notes import find, has
from tunecompile.runtime import telemetry as telemetry_of_steps
from tunecompile.runtime.accumulation import Batch, at_once, steps_of
from tunecompile.runtime.parts import telemetry


def training(size=4, steps=12, alone=0.08, each=1e-4, optimizer=0.05, tokens=None):
    """Batches of a training whose times are a line, with an optimizer behind each step."""
    draw, now, batches = random.Random(0), 0.0, []
    for _ in range(steps):
        for place in range(size):
            count = tokens or draw.randint(100, 900)
            batches.append(Batch(now, count, place == 0))
            now += alone + each * count + optimizer * (place == size - 1)
    return batches


def test_whole_steps_alone():
    batches = training(size=3, steps=4)
    assert [len(step.batches) for step in steps_of(batches[1:])] == [3, 3] and steps_of(batches[1:3]) == []
    assert steps_of(batches)[0].end == batches[3].when


@pytest.mark.parametrize(("most", "count", "left"), [(9, 4, 1), (4, 4, 1), (3, 2, 2), (2, 2, 2)])
def test_what_batches_take_at_once_is_what_a_line_says(most, count, left):
    """As many as fit and divide the step; the time without tokens is there once for each that is left."""
    batches = training()
    found = at_once(batches, most)
    whole = sorted(step.end - step.batches[0].when for step in steps_of(batches))
    expected = 1 - (4 - left) * 0.08 / (whole[5] if len(whole) % 2 else (whole[5] + whole[4]) / 2)
    assert (found.count, found.steps) == (count, left) and found.ratio == pytest.approx(expected, abs=1e-6)
    assert 100 < found.tokens < 900


@pytest.mark.parametrize(
    "batches",
    [
        training(size=1, steps=40),
        training(steps=2),
        training(tokens=512),
        training(alone=0.001),
        training(alone=0.0),
        [Batch(batch.when, batch.tokens, False) for batch in training()],
        [],
    ],
    ids=["nothing accumulated", "few", "one size", "little to save", "nothing to save", "gradients stay", "none"],
)
def test_what_is_not_known_is_not_said(batches):
    assert at_once(batches, 9) is None and at_once(training(), 1) is None


def test_pauses_are_no_times_of_batches():
    """A compilation in one batch does not move the line."""
    batches = training()
    late = [Batch(each.when + 30 * (place > 13), each.tokens, each.begins) for place, each in enumerate(batches)]
    assert at_once(late, 4).ratio == pytest.approx(at_once(batches, 4).ratio, abs=0.02)


class Gauge:
    """A device on which a batch takes 2 GiB of 8."""

    def __init__(self, available=8 * 2**30):
        self.free = available

    def allocated(self):
        return 2**30

    def peak(self):
        return 3 * 2**30, 3 * 2**30

    def available(self):
        return self.free


@pytest.fixture
def trained(monkeypatch):
    """A model after steps of two batches each, whose times a clock makes up."""
    model = tunecompile.optimize(adapted_layers(), executor="eager")
    draw, now = random.Random(0), [0.0]
    monkeypatch.setattr(telemetry_of_steps.time, "perf_counter", lambda: now[0])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(12):
        for _ in range(2):
            length = draw.randint(4, 16)
            model(**zoo.batch(length=length)).loss.backward()
            now[0] += 0.1 + 1e-3 * 2 * length
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_the_report_says_what_accumulated_batches_would_take(trained, monkeypatch):
    """Where they fit: not on a CPU, whose memory nobody counts, and not where there is no room."""
    assert not has(tunecompile.report(trained), "accumulated-apart")
    monkeypatch.setattr(telemetry, "gauge_of", lambda device: Gauge())
    (told,) = find(tunecompile.report(trained), "accumulated-apart")
    assert told.fields["count"] == 2 and told.fields["steps"] == 1 and told.fields["percent"] < 80
    assert told.fields["peak"].startswith("5.00 GiB")
    monkeypatch.setattr(telemetry, "gauge_of", lambda device: Gauge(4 * 2**30))
    assert not has(tunecompile.report(trained), "accumulated-apart")
