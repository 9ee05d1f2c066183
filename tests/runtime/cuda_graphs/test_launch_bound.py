"""Whether kernels wait for the host, on a host and a device that only count time."""

from types import SimpleNamespace

import pytest

from tunecompile.runtime.cuda_graphs import launch_bound
from tunecompile.runtime.cuda_graphs.launch_bound import PROBES, SAMPLES, Clock, HostTime

SHARES = (1 / 12,) * 6 + (1 / 4,) * 2  #: of what a layer computes; the largest products come last


class Machine:
    """A layer launches its kernels one after the other; the device runs each as soon as it is launched and the one before is done. Milliseconds."""

    def __init__(self, launching: float, between: float, computing: float):
        self.launching, self.between, self.computing = launching, between, computing
        self.now = self.done = 0.0

    def layer(self, inputs):
        for share in SHARES:
            self.now += self.launching / len(SHARES)
            self.done = max(self.done, self.now) + self.computing * share

    def occupy(self, device, milliseconds):
        self.done = max(self.done, self.now) + milliseconds

    def mark(self, device):
        return max(self.done, self.now)

    def elapsed(self, begin, end):
        return end - begin

    def step(self, clock, layers, number, copying=0.0):
        self.now = self.done = max(self.now, self.done)  # the loop has read the last loss
        for _ in range(layers):
            (clock.probe if clock.decide() else clock.time)(self.layer, [], None, *[number] * (not clock.waiting))
            with clock.copying.counted():
                self.now += copying
            self.now += self.between


def told(monkeypatch, machine, layers=16, copying=0.0):
    monkeypatch.setattr(launch_bound, "time", SimpleNamespace(perf_counter=lambda: machine.now / 1e3))
    clock = Clock(machine, True, 0, HostTime())
    for number in range(12):
        machine.step(clock, layers, number, copying)
    return clock


@pytest.mark.parametrize("layers", [16, 3])
@pytest.mark.parametrize(
    "launching, between, computing, waiting, saving",
    [
        # 8B QLoRA on 2x512 tokens, H200: a call is computed in 1.6 times the time to launch it, and the device rests all the same
        (0.67, 0.46, 0.90, True, 0.23),
        (1.10, 0.70, 0.90, True, 0.90),  # on a slower host
        (1.10, 0.70, 0.30, True, 1.10),  # what lies between calls is there with recordings, too
        (0.67, 0.46, 1.60, False, 0.0),
        (0.67, 0.46, 5.60, False, 0.0),  # on 4x2048
    ],
)
def test_layers_that_wait_between_calls_are_found(monkeypatch, launching, between, computing, waiting, saving, layers):
    """And what a recording saves of them: a device that is busy with something else first tells how long kernels take that need not wait."""
    clock = told(monkeypatch, Machine(launching, between, computing), layers)
    assert clock.waiting is waiting and clock.known and clock.saving(0) == pytest.approx(saving, abs=1e-9)
    assert clock.launching == pytest.approx(launching if waiting else 0.0)


@pytest.mark.parametrize("computing, saving", [(0.9, 0.23), (1.5, 0.0), (4.0, 0.0)])
def test_what_the_host_spends_on_copies_is_not_saved(monkeypatch, computing, saving):
    """Kernels wait for it, and yet a plan without copies has none of it: there the device is behind."""
    clock = told(monkeypatch, Machine(0.67, 0.46, computing), copying=5.0)
    assert clock.waiting and clock.known and clock.saving(0) == pytest.approx(saving, abs=1e-9)


@pytest.mark.parametrize("computing, waiting", [(0.5, True), (2.0, False)])
def test_a_layer_alone_is_judged_by_its_calls(monkeypatch, computing, waiting):
    """From one beginning to the next it would be the step, whose loop waits for the device."""
    assert told(monkeypatch, Machine(1.0, 30.0, computing), layers=1).waiting is waiting


def test_what_is_known_is_timed_no_more(monkeypatch):
    """Nor more calls than are needed; each call runs all the same."""
    monkeypatch.setattr(launch_bound, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    for waiting, timed in ((None, SAMPLES + 1), (False, 0), (True, SAMPLES + 1)):
        clock, ran = Clock(Machine(1.0, 0.5, 0.5), True, 0, HostTime()), []
        clock.waiting = waiting
        for number in range(SAMPLES + 3):
            assert clock.time(lambda inputs: ran.append(inputs) or "result", [number], None, 0) == "result"
        assert len(clock.calls) == timed and ran == [[number] for number in range(SAMPLES + 3)]


def test_nothing_is_told_until_the_device_has_answered(monkeypatch):
    machine = Machine(1.0, 0.5, 0.5)
    monkeypatch.setattr(machine, "elapsed", lambda begin, end: None)
    assert told(monkeypatch, machine).waiting is None


def test_what_a_recording_saves_is_not_known_before_a_few_calls_told(monkeypatch):
    machine = Machine(1.0, 0.5, 0.5)
    clock = told(monkeypatch, machine)
    assert clock.known and len(clock.probes) == PROBES
    probe = clock.probes.pop()
    clock.computing = None
    assert not clock.known
    clock.probes.append(probe)
    with monkeypatch.context() as patched:
        patched.setattr(machine, "elapsed", lambda begin, end: None)
        assert not clock.known, "the device has not answered"
    assert clock.known and clock.saving(0) == pytest.approx(1.0)


def test_more_tokens_are_computed_for_longer_and_launched_as_fast(monkeypatch):
    clock = told(monkeypatch, Machine(1.0, 0.5, 0.5))
    clock.tokens = 100
    found = [clock.saving(tokens) for tokens in (50, 100, 200, 290, 300, 1000)]
    assert found == pytest.approx([1.0, 1.0, 0.5, 0.05, 0.0, 0.0])
