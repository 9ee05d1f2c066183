"""A recorder for CPUs, and a model whose layers it records together.

It does again, in place, what it was given: all but the device's own part is the real thing.
"""

import copy

import pytest

import tunecompile
from tests.support import zoo
from tests.support.memory.cpu_recorder import CpuRecorder
from tests.support.models.pairs import of_plain_layers
from tunecompile.runtime.cuda_graphs import launch_bound, replay, stacks
from tunecompile.runtime.cuda_graphs.chain import Chain


@pytest.fixture
def on_cpu(monkeypatch):
    """What runs on a CPU is recorded."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)


@pytest.fixture(params=[0, 3])
def waits(request, monkeypatch):
    """A pass is replayed at its first call, or waits for inputs that a later one might bring."""
    take = Chain._take

    def take_and_wait(self, calls):
        take(self, calls)
        self.ready = max(self.ready, min(request.param, len(calls) - 1))

    monkeypatch.setattr(Chain, "_take", take_and_wait)


@pytest.fixture
def stack(on_cpu, waits):
    """(optimized, as it was): four layers that are one stack."""
    reference = zoo.adapt(of_plain_layers(num_hidden_layers=4), target_modules=["inner"]).train()
    return tunecompile.optimize(copy.deepcopy(reference), executor="eager"), reference


@pytest.fixture
def replayed(monkeypatch):
    """The passes that were replayed, by the number of their layers."""
    found, replay_of = [], stacks.Stacks._replay

    def watched(self, chain, inputs):
        output = replay_of(self, chain, inputs)
        found.extend([len(chain.calls)] if output is not None else [])
        return output

    monkeypatch.setattr(stacks.Stacks, "_replay", watched)
    return found
