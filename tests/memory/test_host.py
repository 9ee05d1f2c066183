"""Host memory is given out in pieces, within its limit."""

import torch

from tunecompile.memory.host import Pool, available


def test_pieces_never_overlap_in_any_order():
    generator = torch.Generator().manual_seed(0)
    pool = Pool(64, lambda n: torch.empty(n, dtype=torch.uint8), granule=4, slab=16)
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
    pool = Pool(11 * 4, lambda n: sizes.append(n) or torch.empty(n, dtype=torch.uint8), granule=4, slab=16)
    assert pool.take(44) is not None and pool.take(1) is None
    assert sizes == [16, 16, 8, 4]


def test_available_memory_is_known():
    assert available() > 1 << 20
