"""Out of memory on a GPU, whose allocator says so itself."""

import functools
import gc

import pytest
import torch

import tunecompile
from tests.support.memory.full_device import WHERE, Full, Tiny, gradients, ids
from tests.support.notes import has
from tunecompile.errors import NothingFits
from tunecompile.planner.device_memory import CudaGauge

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
ROWS = 2048


def on_gpu(memory=None, **options):
    # many layers, so that the forward needs most of the memory: a backward is repeated only where memory is known to be scarce
    return tunecompile.optimize(Tiny(512, layers=12).to("cuda").train(), memory=memory, executor="eager", **options)


def gpu_step(model):
    torch.manual_seed(3)
    found = model(ids(ROWS).cuda(), ids(ROWS).roll(-1, 1).cuda())
    found.backward()
    return found.detach(), gradients(model)


def near(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # another mask of a dropout would be far off


@functools.cache
def on_gpu_needed():
    """(bytes beside the step, bytes at its peak, budget that it just fits into)"""
    model = on_gpu("100GiB", host_memory=0)
    gpu_step(model)
    torch.cuda.empty_cache()
    beside = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gpu_step(model)
    predicted = tunecompile.report(model).memory["predicted_peak"]
    return beside, torch.cuda.max_memory_allocated(), int(1.3 * max(torch.cuda.max_memory_reserved(), predicted))


@pytest.fixture
def limited():
    def limit(nbytes):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("host_memory", [0, None])
@pytest.mark.parametrize("where", WHERE)
def test_an_allocation_fails(where, host_memory, monkeypatch):
    def strike(self, _grad=None):
        if self.left:
            self.left -= 1
            self.raised += 1
            torch.empty(1 << 44, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(Full, "strike", strike)
    expected = gpu_step(on_gpu())
    model = on_gpu(on_gpu_needed()[2], host_memory=host_memory)
    near(gpu_step(model), expected)
    full = Full(model, 1, where)
    for _ in range(3):
        near(gpu_step(model), expected)
    assert full.raised == 1 and has(model, "ran-out-of-memory")


def test_a_smaller_gpu_than_was_said(limited, monkeypatch):
    monkeypatch.setattr(CudaGauge, "available", CudaGauge.total)  # or the plan would follow the limit
    expected = gpu_step(on_gpu())
    beside, most, _ = on_gpu_needed()
    model = on_gpu("100GiB", host_memory=0)
    near(gpu_step(model), expected)
    present = torch.cuda.memory_allocated()
    limited(present + int(0.85 * (most - beside)))
    for _ in range(3):
        near(gpu_step(model), expected)
    assert has(model, "ran-out-of-memory")
    limited(present + int(0.1 * (most - beside)))
    with pytest.raises(NothingFits, match="Most would help"):
        gpu_step(model)
    limited(torch.cuda.get_device_properties(0).total_memory)
    model.zero_grad()
    near(gpu_step(model), expected)
