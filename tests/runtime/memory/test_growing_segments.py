"""When torch's allocator lets segments grow without a budget: the GPU and the allocator are stand-ins."""

from types import SimpleNamespace

import pytest
import torch

from tunecompile.runtime.model_state import ModelCall
from tunecompile.runtime.parts import memory
from tunecompile.runtime.parts.memory import GrowingSegments

GPU = torch.device("cuda", 0)


@pytest.fixture
def done(monkeypatch):
    """What was asked of the allocator, in order."""
    asked = []
    monkeypatch.setattr(memory, "grow_segments", lambda: asked.append("grow") or True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    return asked


def state_of(device=GPU, memory=None):
    return SimpleNamespace(memory=memory, slots=[SimpleNamespace(device=device)])


def call_of(rows, length, counts=True):
    return ModelCall((), {"input_ids": torch.zeros(rows, length)}, counts)


def run(state, *sizes):
    part = GrowingSegments()
    for size in sizes:
        part.before_step(state, call_of(*size))


def test_the_second_size_lets_them_grow_once(done):
    run(state_of(), (2, 8), (2, 8), (2, 16), (3, 16), (2, 8))
    assert done == ["grow", "empty"]


def test_what_the_first_size_left_stays_where_they_may_not_grow(done, monkeypatch):
    monkeypatch.setattr(memory, "grow_segments", lambda: done.append("asked"))
    run(state_of(), (2, 8), (2, 16), (2, 24))
    assert done == ["asked"]


@pytest.mark.parametrize(
    "state, sizes",
    [
        (state_of(), [(2, 8), (2, 8)]),
        (state_of(), [(2, 8), (2, 16, False)]),  # an encoder's call beside the decoder's
        (state_of(torch.device("cpu")), [(2, 8), (2, 16)]),
        (state_of(None), [(2, 8), (2, 16)]),
        (state_of(memory="10GiB"), [(2, 8), (2, 16)]),
    ],
    ids=["one size", "encoder", "cpu", "nowhere", "budget"],
)
def test_they_stay_as_they_are(state, sizes, done):
    run(state, *sizes)
    assert not done
