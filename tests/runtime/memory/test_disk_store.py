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
        monkeypatch.setattr("tunecompile.runtime.memory.host.disk_store._write", no_space)
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

    def fill(self, value, blocks=1, mark=None):
        stay = self.store.take(blocks * BLOCK)
        for piece in stay.room.pieces:
            piece.fill_(value)
        self.store.filled([stay], mark or CopyMark())
        return stay

    def value(self, stay):
        pieces = self.store.load(stay).pieces
        assert {piece.dtype for piece in pieces} == {torch.uint8} and sum(map(len, pieces)) == stay.nbytes
        (value,) = {piece.item() for piece in torch.cat(pieces)}
        return value


class Event:
    """Of the device: how often the host waited for it."""

    waited = 0

    def synchronize(self):
        self.waited += 1


def no_space(path, *_):
    """What `_write` does on a full disk."""
    path.write_bytes(b"a part")
    raise OSError(28, "No space left on device")


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
        assert blocks.value(first) == 3 and blocks.store.ready(first) and 20 < blocks.store.blocked_ms < 5000

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
        monkeypatch.setattr("tunecompile.runtime.memory.host.disk_store._write", no_space)
        blocks = make(room=2)
        assert blocks.store.why_not() == "host memory is full"
        first, second = blocks.fill(3), blocks.fill(4)
        assert blocks.store.take(BLOCK) is None and blocks.store.take(BLOCK) is None
        assert blocks.store.why_not() == "no more room on disk: [Errno 28] No space left on device"
        assert first.file is None and blocks.value(first) == 3 and blocks.value(second) == 4
        assert "1" not in [path.name for path in files(blocks.folder)], "what was written of it"
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

    def test_what_was_read_ahead_is_ready_once_it_is_there(self, make):
        blocks = make(room=1)
        first, second = blocks.fill(3), blocks.fill(4)
        blocks.store.give(second)
        blocks.store.prepare(first)
        first.file.job.result()
        assert first.file.reading and blocks.store.ready(first)

    def test_what_cannot_be_read_ahead_is_no_block_in_memory(self, make):
        """Its memory is wanted for another one before it is loaded: it is read again, and that says what is wrong."""
        blocks = make(room=1)
        first, second = blocks.fill(3), blocks.fill(4)
        blocks.store.give(second)
        hidden = first.file.path.rename(first.file.path.with_suffix(".hidden"))
        blocks.store.prepare(first)
        assert blocks.fill(5).room is not None and first.room is None and blocks.store.failure is None
        with pytest.raises(FileNotFoundError):
            blocks.store.load(first)
        hidden.rename(first.file.path)

    def test_memory_is_wanted_back_from_what_was_read_ahead(self, make):
        blocks = make(room=1)
        first, second = blocks.fill(3), blocks.fill(4)
        blocks.store.give(second)
        blocks.store.prepare(first)
        third = blocks.fill(5)
        assert first.room is None and not blocks.store.ready(first)
        assert (blocks.value(first), blocks.value(third)) == (3, 5)


class TestTaking:
    """Memory for a block, where host memory is full."""

    @pytest.fixture
    def make(self, tmp_path):
        return lambda room: Blocks(tmp_path, room)

    def test_without_a_disk_there_is_none(self, make):
        blocks = make(room=1)
        blocks.store.disk = None
        stay = blocks.fill(3)
        assert blocks.store.take(BLOCK) is None and blocks.value(stay) == 3
        assert blocks.store.why_not() == "host memory is full"
        blocks.store.pool.failure = "no more pinned memory"
        assert blocks.store.why_not() == "no more pinned memory"

    def test_a_block_of_more_than_there_is_gets_none(self, make):
        blocks = make(room=2)
        stay = blocks.fill(3)
        assert blocks.store.take(3 * BLOCK) is None and blocks.value(stay) == 3

    def test_as_many_go_to_disk_as_a_large_block_needs(self, make):
        """Also those that were not written ahead."""
        blocks = make(room=5)
        stays = [blocks.fill(value) for value in range(4)]
        assert [stay.file is None for stay in stays] == [False, True, True, True]
        large = blocks.fill(9, blocks=3)
        assert [stay.room is None for stay in stays] == [True, True, False, False]
        assert [blocks.value(stay) for stay in (*stays, large)] == [0, 1, 2, 3, 9]

    def test_memory_of_its_own_is_not_taken_from_a_block(self, make):
        """It frees nothing in the pool."""
        blocks = make(room=1)
        first, second = blocks.fill(3), blocks.fill(4)
        assert blocks.value(first) == 3 and first.room.extents == []
        assert blocks.store.take(BLOCK) is not None and first.room is not None and second.room is None


class TestOrder:
    """Copies of a GPU's go on while the host is ahead: whoever gets memory next must come behind them."""

    @pytest.fixture
    def blocks(self, tmp_path):
        return Blocks(tmp_path, room=1)

    def test_the_next_copies_come_behind_those_of_the_last_owner(self, blocks, monkeypatch):
        ordered = []
        monkeypatch.setattr(blocks.store.copier, "order", ordered.append)
        marks = [CopyMark(), CopyMark()]
        first, second = (blocks.fill(value, mark=mark) for value, mark in zip((3, 4), marks))
        assert first.room is None and len(ordered) == 1 and ordered[0] is marks[0]
        blocks.store.give(second)
        assert len(ordered) == 2 and ordered[1] is marks[1]
        blocks.store.give(blocks.store.take(BLOCK))
        assert len(ordered) == 2, "no copy was made"

    def test_a_block_is_written_when_its_copy_has_ended(self, blocks):
        event = Event()
        stay = blocks.fill(3, mark=CopyMark(end=event))
        stay.file.job.result()
        assert event.waited == 1

    def test_a_block_is_read_when_its_memory_is_free(self, blocks, monkeypatch):
        """The copies of the memory's last owner have ended."""
        event = Event()
        monkeypatch.setattr(blocks.store.copier, "fence", lambda: [CopyMark(end=event)])
        first, second = blocks.fill(3), blocks.fill(4)
        blocks.store.give(second)
        blocks.store.prepare(first)
        first.file.job.result()
        assert event.waited == 1 and blocks.value(first) == 3


def test_a_file_that_is_too_short_is_an_error(tmp_path):
    blocks = Blocks(tmp_path, room=1)
    first, _ = blocks.fill(3), blocks.fill(4)
    first.file.path.write_bytes(bytes(BLOCK - 1))
    with pytest.raises(OSError, match="shorter"):
        blocks.store.load(first)


def test_a_folder_is_made_with_those_around_it(tmp_path):
    for _ in range(2):
        assert Disk(tmp_path / "a" / "b").folder.name.startswith(str(tmp_path / "a" / "b"))
