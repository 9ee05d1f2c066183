"""Which saved tensors leave the device, one by one: other kinds of tensors stay, and what comes back too late is fetched."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support.compare import equal_bits
from tests.support.memory.copy_engine import HostCopyEngine
from tests.support.memory.offload_stack import empty, inputs, make_offload, offloaded, plain, run
from tunecompile.runtime.memory.host.pinned_pool import ResidentCopyEngine

ROWS = 16


def gradient(fn, offload=None):
    """Of what a layer computes of the same matrix, as it is or with its saved tensors on the host."""
    x = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    if offload is None:
        fn(x).sum().backward()
        return x.grad
    offload.begin_step()
    with offload.layer(0, nn.Identity()):
        y = fn(x)
    offload.settle()
    y.sum().backward()
    return x.grad


def moved(fn):
    """Bytes that left the device, while the gradient is the same."""
    offload = make_offload()
    assert torch.equal(gradient(fn, offload), gradient(fn))
    report = offload.report()
    assert report["bytes_back"] == report["bytes_out"], "all of it comes back once"
    assert report["disk_bytes"] == report["blocked_ms"] == 0
    return report["bytes_out"]


def test_sparse_tensors_stay():
    """They have no storage."""
    picked = torch.eye(ROWS).to_sparse()
    assert moved(lambda x: torch.sparse.mm(picked, x)) == 0
    assert moved(lambda x: x.exp()) == ROWS * ROWS * 4


def test_tensors_that_are_read_as_their_conjugates_or_negatives_stay():
    """Bytes alone do not tell what is read of them."""
    waves = torch.randn(ROWS, ROWS, dtype=torch.complex64)
    assert moved(lambda x: (x * waves).real) == waves.nbytes
    assert moved(lambda x: (x * waves.conj()).real) == 0
    negative = torch.complex(torch.zeros(ROWS, ROWS), torch.ones(ROWS, ROWS)).conj().imag
    assert negative.is_neg() and moved(lambda x: x * negative) == 0


def test_tensors_of_another_device_stay():
    offload = make_offload()
    offload.device = torch.device("meta")
    assert torch.equal(gradient(torch.exp, offload), gradient(torch.exp)) and not offload.report()["bytes_out"]


def test_small_tensors_stay():
    offload = make_offload()
    offload.smallest = ROWS * ROWS * 4
    gradient(torch.exp, offload)
    assert offload.report()["bytes_out"] == ROWS * ROWS * 4
    offload.smallest += 1
    gradient(torch.exp, offload)
    assert offload.report()["bytes_out"] == 0


def test_a_layer_tells_which_of_its_tensors_go():
    offload, asked = make_offload(), []
    x = torch.randn(ROWS, ROWS, requires_grad=True)
    with offload.layer(3, nn.Identity(), lambda tensor: asked.append(tensor.shape) or tensor.shape[0] == 2 * ROWS):
        y = torch.cat([x, x]).exp().sum() + x.exp().sum()
    assert {shape[0] for shape in asked} == {ROWS, 2 * ROWS}
    assert offload.report()["bytes_out_by_layer"] == {3: 2 * ROWS * ROWS * 4}
    y.backward()
    torch.testing.assert_close(x.grad, 3 * x.detach().exp())


@pytest.mark.parametrize("ahead", [1, 2])
def test_what_cannot_be_fetched_ahead_is_fetched_when_it_is_needed(ahead):
    class Full(HostCopyEngine):
        asked = 0

        def back(self, rooms):
            self.asked += 1
            if self.asked % 2 == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().back(rooms)

    offload, calm = make_offload(copier=Full(), ahead=ahead), make_offload(ahead=ahead)
    for each in (offload, calm):
        assert equal_bits(run(offloaded(each), inputs()), plain(inputs()))
    report = offload.report()
    assert report["refusals"]["no memory on the device to fetch ahead"] > 0 and empty(offload)
    assert report["bytes_back"] == calm.report()["bytes_back"] > 0 and not calm.report()["refusals"], "each once"


def test_what_was_saved_does_not_keep_its_layer_alive():
    offload, layer = make_offload(), nn.Identity()
    x = torch.randn(ROWS, ROWS, requires_grad=True)
    with offload.layer(0, layer, lambda tensor, layer=layer: True):
        y = x.exp().sum()
    seen = weakref.ref(layer)
    del layer
    gc.collect()
    assert seen() is None
    y.backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_host_memory_is_allocated_ahead_where_copies_are_made():
    expected = []
    for offload in (make_offload(), make_offload(copier=ResidentCopyEngine())):
        offload.blocks.pool.expect = expected.append
        offload.expect(7)
    assert expected == [7]


def test_times_are_those_of_a_step():
    class Timed(HostCopyEngine):
        resets = 0

        def reset(self):
            self.resets += 1

    offload = make_offload(copier=Timed())
    before = offload.blocks.copier.resets
    for _ in range(2):
        offload.begin_step()
    assert offload.blocks.copier.resets == before + 2


def test_what_was_not_copied_yet_stays_for_its_backward():
    """Of a forward that failed: neither the next step nor head and loss drop it."""
    offload = make_offload()
    x = torch.randn(ROWS, ROWS, requires_grad=True)
    with pytest.raises(ValueError), offload.layer(0, nn.Identity()):
        y = x.exp() * 2
        raise ValueError
    offload.begin_step()
    offload.settle()
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())
    assert offload.report()["bytes_out"] == 0
    del y
    assert empty(offload)
