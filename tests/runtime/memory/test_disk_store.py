"""Tensors that host memory cannot hold go to files, and come back as they were."""

import gc
import threading

import pytest
import torch

from tests.support.compare import equal_bits
from tests.support.memory.copy_engine import HostCopyEngine
from tests.support.memory.offload_stack import empty, files, inputs, make_offload, offloaded, plain, run
from tunecompile.runtime.memory.host.disk_store import BlockStore, Disk
from tunecompile.runtime.memory.host.pinned_pool import GRANULE, CopyMark, PinnedPool


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


BLOCK = 8  #: bytes


class Blocks:
    """A store of so many blocks of host memory, and its disk, whose thread can be held up."""

    def __init__(self, folder, room):
        pool = PinnedPool(room * BLOCK, lambda n: torch.empty(n, dtype=torch.uint8), granule=BLOCK, slab=BLOCK)
        self.store, self.resume = BlockStore(pool, HostCopyEngine(), Disk(folder)), threading.Event()
        self.folder = folder

    def hold_up(self):
        self.store.disk.worker.submit(self.resume.wait, 5)

    def go_on(self):
        self.resume.set()
        self.store.disk.worker.submit(int).result()

    def fill(self, value):
        stay = self.store.take(BLOCK)
        stay.room.pieces[0].fill_(value)
        self.store.filled([stay], CopyMark())
        return stay

    def value(self, stay):
        (piece,) = self.store.load(stay).pieces
        assert piece.dtype == torch.uint8 and piece.numel() == BLOCK and piece.unique().numel() == 1
        return piece[0].item()


class TestLoading:
    """One block after the other. On a GPU their copies go on meanwhile; here they are done at once."""

    @pytest.fixture
    def make(self, tmp_path):
        made = []
        yield lambda room: made.append(Blocks(tmp_path, room)) or made[-1]
        for each in made:
            each.go_on()

    def test_a_block_that_was_not_written_yet_stays_in_memory(self, make):
        blocks = make(room=2)
        blocks.hold_up()
        stay = blocks.fill(3)
        assert stay.file is not None and not files(blocks.folder) and blocks.store.ready(stay)
        assert blocks.value(stay) == 3 and stay.file is None
        blocks.go_on()
        assert not files(blocks.folder), "nobody would delete it"
        blocks.store.give(stay)
        assert not blocks.store.stays and not blocks.store.pool.used

    def test_a_block_that_was_written_keeps_its_file(self, make):
        """It need not be written again, where its memory is wanted once more."""
        blocks = make(room=2)
        stay = blocks.fill(3)
        blocks.go_on()
        assert blocks.value(stay) == 3 and stay.file is not None and files(blocks.folder) == [stay.file.path]
        stay.room.pieces[0].fill_(4)
        assert blocks.value(stay) == 4, "nothing is read into what is in memory"
        blocks.store.give(stay)
        assert not files(blocks.folder)

    def test_a_block_that_was_never_written_has_no_file(self, make):
        blocks = make(room=4)
        stay = blocks.fill(3)
        assert stay.file is None and blocks.value(stay) == 3 and stay.file is None

    def test_blocks_on_disk_are_read_once(self, make):
        """Into memory of their own, where host memory is taken."""
        blocks = make(room=1)
        first, second = blocks.fill(3), blocks.fill(4)
        assert first.room is None and second.room is not None and not blocks.store.ready(first)
        assert blocks.value(first) == 3 and first.room.extents == [] and not first.file.reading
        assert blocks.store.ready(first) and blocks.store.pool.used == BLOCK
        first.room.pieces[0].fill_(5)
        assert blocks.value(first) == 5 and blocks.value(second) == 4

    def test_what_is_read_ahead_is_waited_for(self, make):
        blocks = make(room=1)
        first, second = blocks.fill(3), blocks.fill(4)
        blocks.store.give(second)
        blocks.hold_up()
        blocks.store.prepare(first)
        assert first.file.reading and not blocks.store.ready(first)
        threading.Timer(0.05, blocks.resume.set).start()
        assert blocks.value(first) == 3 and blocks.store.ready(first) and blocks.store.blocked_ms > 20

    def test_what_has_room_again_is_read_into_host_memory(self, make):
        blocks = make(room=1)
        first, second = blocks.fill(3), blocks.fill(4)
        blocks.store.give(second)
        assert blocks.value(first) == 3 and len(first.room.extents) == 1 and blocks.store.pool.used == BLOCK
        assert blocks.store.written == 2 * BLOCK, "each block once"

    def test_the_oldest_are_written_as_two_layers_lack_room(self, make):
        """And no more of them than that."""
        blocks = make(room=5)
        stays = [blocks.fill(value) for value in range(4)]
        assert [stay.file is not None for stay in stays] == [True, False, False, False]
        assert blocks.store.written == BLOCK and all(stay.room is not None for stay in stays)

    def test_a_full_disk_is_said_once(self, make, monkeypatch):
        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("tunecompile.runtime.memory.host.disk_store._write", fail)
        blocks = make(room=2)
        assert blocks.store.why_not() == "host memory is full"
        first, second = blocks.fill(3), blocks.fill(4)
        assert blocks.store.take(BLOCK) is None and blocks.store.take(BLOCK) is None
        assert blocks.store.why_not() == "no more room on disk: [Errno 28] No space left on device"
        assert first.file is None and blocks.value(first) == 3 and blocks.value(second) == 4
        files_begun = blocks.store.disk.files
        blocks.store.give(second)
        blocks.fill(5)
        assert blocks.store.disk.files == files_begun, "nothing more is written"

    def test_a_file_that_is_gone_is_an_error(self, make):
        blocks = make(room=1)
        first, _ = blocks.fill(3), blocks.fill(4)
        first.file.path.unlink()
        with pytest.raises(FileNotFoundError):
            blocks.store.load(first)
