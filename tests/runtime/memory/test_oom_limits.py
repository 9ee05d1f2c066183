"""Recovery from a full device keeps nothing beyond the step, and gives up where nothing fits."""

import weakref

import pytest
import torch

from tests.support.compare import assert_equal
from tests.support.memory.budgets import LAYERS
from tests.support.memory.full_device import WHERE, Full, guarded, loss, plain, recovery, step
from tunecompile._torch.cuda import requested
from tunecompile.errors import NothingFits

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_nothing_is_held_beyond_the_step():
    model = guarded()
    found = loss(model)
    calls = [weakref.ref(call) for call in recovery(model).calls]
    nodes = [weakref.ref(call().edges[0].node) for call in calls]
    assert len(calls) == LAYERS and all(node() is not None for node in nodes)
    recovery(model).make_room(0, 1, model._tunecompile.step.budget)
    assert all(node() is None for node in nodes), "a dropped graph is freed"
    found.backward()
    del found
    assert all(call() is None for call in calls)


def test_when_nothing_fits():
    model = guarded()
    full = Full(model, 1, WHERE[0], times=100)
    with pytest.raises(
        NothingFits, match="is short of 0.00 MiB. Most would help a smaller batch: about [0-9]+ tokens"
    ) as caught:
        step(model)
    assert isinstance(caught.value, torch.OutOfMemoryError) and full.raised <= 4
    full.left = 0
    model.zero_grad()
    assert_equal(step(model), plain())


def test_bytes_that_were_asked_for():
    assert requested(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0")) == 3 << 29
    assert requested(torch.OutOfMemoryError("out of memory")) == 0
