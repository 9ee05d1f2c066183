"""Tensors that host memory cannot hold go to files, and come back as they were."""

import gc

import torch

from tests.support.compare import equal_bits
from tests.support.memory.offload_stack import empty, files, inputs, make_offload, offloaded, plain, run
from tunecompile.runtime.memory.host.pinned_pool import GRANULE


class TestDisk:
    def test_takes_what_host_memory_cannot(self, tmp_path):
        offload = make_offload(host_bytes=8 * GRANULE, folder=tmp_path)
        stack = offloaded(offload, layers=8)
        for seed in range(3):
            assert equal_bits(run(stack, inputs(seed)), plain(inputs(seed), layers=8))
            report = offload.report()
            assert report["disk_bytes"] > 0 and not report["refusals"] and report["peak_host_bytes"] <= 8 * GRANULE
            assert empty(offload) and not files(tmp_path)

    def test_backward_twice_and_forwards_left_alone(self, tmp_path):
        offload = make_offload(host_bytes=8 * GRANULE, folder=tmp_path)
        stack = offloaded(offload, layers=8)
        stack(inputs())
        loss = stack(inputs())
        assert files(tmp_path)
        expected = plain(inputs(), layers=8)[1]
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
            assert all(map(torch.equal, expected, stack.gradients()))
        del loss
        assert empty(offload) and not files(tmp_path)

    def test_a_full_disk_leaves_tensors_where_they_are(self, tmp_path, monkeypatch):
        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("tunecompile.runtime.memory.host.disk_store._write", fail)
        offload = make_offload(host_bytes=8 * GRANULE, folder=tmp_path)
        assert equal_bits(run(offloaded(offload, layers=8), inputs()), plain(inputs(), layers=8))
        (reason,) = offload.report()["refusals"]
        assert reason == "no more room on disk: [Errno 28] No space left on device"
        assert empty(offload) and not files(tmp_path)

    def test_the_folder_goes_with_the_runtime(self, tmp_path):
        offload = make_offload(host_bytes=8 * GRANULE, folder=tmp_path)
        loss = offloaded(offload, layers=8)(inputs())
        assert list(tmp_path.iterdir())
        del loss, offload
        gc.collect()
        assert not list(tmp_path.iterdir())
