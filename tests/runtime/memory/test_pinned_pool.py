"""Host memory is given out in pieces, within its limit."""

import threading

import torch

from tunecompile.runtime.memory.host import pinned_pool
from tunecompile.runtime.memory.host.pinned_pool import PinnedPool, available


def test_pieces_never_overlap_in_any_order():
    generator = torch.Generator().manual_seed(0)
    pool = PinnedPool(64, lambda n: torch.empty(n, dtype=torch.uint8), granule=4, slab=16)
    held = []
    for value in range(500):
        size = int(torch.randint(1, 24, (1,), generator=generator))
        if (room := pool.take(size)) is not None:
            assert sum(piece.numel() for piece in room.pieces) == size
            for piece in room.pieces:
                piece.fill_(value % 251)
            held.append((room, value % 251))
        else:
            assert pool.room < size + 4
        if room is None or len(held) > 3:
            given, value = held.pop(int(torch.randint(len(held), (1,), generator=generator)))
            assert all(piece.eq(value).all() for piece in given.pieces)
            pool.give(given)
    for room, _ in held:
        pool.give(room)
    assert pool.used == 0 and pool.reserved <= 64 and sum(end - begin for _, begin, end in pool.free) == pool.reserved
    assert len(pool.free) == len(pool.slabs)


def test_limits_that_are_no_power_of_two():
    sizes = []
    pool = PinnedPool(11 * 4, lambda n: sizes.append(n) or torch.empty(n, dtype=torch.uint8), granule=4, slab=16)
    assert pool.take(44) is not None and pool.take(1) is None
    assert sizes == [16, 16, 8, 4]


def test_a_block_is_of_one_piece_where_one_is_long_enough():
    """A copy for each piece: small gaps before it are left."""
    pool = PinnedPool(64, lambda n: torch.empty(n, dtype=torch.uint8), granule=4, slab=64)
    first, _, third, _ = (pool.take(n) for n in (4, 4, 12, 4))
    pool.give(first)
    pool.give(third)
    found = pool.take(12)
    assert [piece.numel() for piece in found.pieces] == [12] and found.extents == third.extents
    assert [piece.numel() for piece in pool.take(44).pieces] == [4, 40], "the gap and the rest, where none is"


def test_available_memory_is_known():
    assert available() > 1 << 20


def test_available_memory_where_the_system_tells_less(monkeypatch):
    """The least of what the machine and the container say; else what the C library says; else nothing is known."""
    told = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   3000 kB\n"}
    monkeypatch.setattr(pinned_pool, "_read", lambda path: told.get(path, ""))
    pages = {"SC_AVPHYS_PAGES": 7, "SC_PAGE_SIZE": 40}
    monkeypatch.setattr(pinned_pool.os, "sysconf", pages.__getitem__, raising=False)
    monkeypatch.setattr(pinned_pool.os, "sysconf_names", pages, raising=False)
    assert available() == 3000 << 10
    told |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "1000\n"}
    assert available() == 3000 << 10
    told["/sys/fs/cgroup/memory.max"] = "5000\n"
    assert available() == 4000
    told["/sys/fs/cgroup/memory.current"] = "6000\n"
    assert available() == 0
    told.clear()
    assert available() == 7 * 40
    with monkeypatch.context() as patch:
        patch.delattr(pinned_pool.os, "sysconf")
        assert available() == 0, "Windows has no such function"
    pages.clear()
    assert available() == 0, "macOS has no such name"


def test_what_is_expected_is_allocated_by_another_thread():
    made, main = [], threading.get_ident()

    def allocate(n):
        made.append((n, threading.get_ident() != main))
        return torch.empty(n, dtype=torch.uint8)

    pool = PinnedPool(1000, allocate, granule=4, slab=16)
    pool.expect(3 * 16 + 8)
    rooms = [pool.take(16) for _ in range(4)]
    assert all(rooms) and made == [(16, True)] * 3 + [(16, False)]
    pool.expect(4 * 16)  # all there already
    assert len({piece.data_ptr() for room in rooms for piece in room.pieces}) == 4 and len(made) == 4


def test_no_more_is_expected_than_may_be_taken():
    made = []
    pool = PinnedPool(40, lambda n: made.append(n) or torch.empty(n, dtype=torch.uint8), granule=4, slab=16)
    pool.expect(1000)
    assert pool.take(40) is not None and pool.take(1) is None
    assert made == [16, 16, 8]


def test_what_cannot_be_allocated_ahead_ends_growth():
    def allocate(n):
        if len(made) == 2:
            raise RuntimeError("nothing left to pin")
        made.append(n)
        return torch.empty(n, dtype=torch.uint8)

    made = []
    pool = PinnedPool(1000, allocate, granule=4, slab=16)
    pool.expect(5 * 16)
    assert pool.take(32) is not None and pool.take(16) is None
    assert "nothing left to pin" in pool.failure and pool.reserved == 32
    assert pool.ahead.left == 0, "the thread has ended: whoever waited for more would wait for ever"
    pool.expect(5 * 16)
    assert pool.take(16) is None


def test_the_process_does_not_wait_for_what_nobody_takes():
    begun, ended = threading.Event(), threading.Event()
    pool = PinnedPool(1000, lambda n: begun.set() or ended.wait(60), granule=4, slab=16)
    pool.expect(16)
    assert begun.wait(10)
    assert all(each.daemon for each in threading.enumerate() if each.name == "tunecompile-host-memory")
    ended.set()
