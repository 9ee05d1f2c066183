"""What a mask says: documents and windows, or nothing that is understood."""

import pytest
import torch

from tunecompile.runtime.unpad.documents import BOTH_WAYS, read_mask, read_offsets, read_padding
from tunecompile.runtime.unpad.flat_batch import FlatBatch


def causal(real: torch.Tensor, document: torch.Tensor | None = None, window: int = 0) -> torch.Tensor:
    """[B, 1, T, T]: each real token sees real ones before it, of its own document, as far back as the window reaches."""
    place = torch.arange(real.shape[1])
    back = place[:, None] - place
    seen = (back >= 0) & real[:, None, :]
    if document is not None:
        seen = seen & (document[:, :, None] == document[:, None, :])
    return (seen & (back < window) if window else seen)[:, None]


def rows(*lengths: int, length: int, left: bool = False) -> torch.Tensor:
    place, count = torch.arange(length), torch.tensor(lengths)[:, None]
    return place >= length - count if left else place < count


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("lengths", [(7, 4, 1), (7, 7), (3, 0, 5), (1,)])
def test_padding(lengths, window, left):
    real = rows(*lengths, length=7, left=left)
    found = read_mask(causal(real, window=window), (window, 0), None).documents
    assert torch.equal(found.real, real) and found.count == sum(lengths) and found.longest == max(lengths)
    assert found.documents == sum(1 for length in lengths if length) and found.window == window


def test_documents_of_packed_rows():
    document = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    real = torch.ones_like(document, dtype=torch.bool)
    reading = read_mask(causal(real, document), (0,), None)
    flat = FlatBatch.of(reading.documents)
    assert flat.offsets.tolist() == [0, 2, 5, 6, 7, 12, 16] and not flat.drops and not reading.full
    assert flat.index[:12].tolist() == list(range(12)) and flat.longest.shape[0] >= 5


def test_packed_rows_that_are_padded():
    document = torch.tensor([[0, 0, 1, 1, 1, 9, 9], [0, 1, 1, 1, 1, 1, 9]])
    reading = read_mask(causal(document < 9, document), (0,), None)
    flat = FlatBatch.of(reading.documents)
    assert flat.offsets.tolist()[:5] == [0, 2, 5, 6, 11] and flat.drops
    assert flat.index[:11].tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12]


def test_bounds_say_what_a_mask_of_documents_says():
    document = torch.tensor([[0, 0, 1, 1, 1, 2]])
    by_mask = FlatBatch.of(read_mask(causal(torch.ones(1, 6, dtype=torch.bool), document), (0,), None).documents)
    by_bounds = FlatBatch.of(read_offsets(torch.tensor([0, 2, 5, 6], dtype=torch.int32)).documents)
    assert torch.equal(by_bounds.offsets, by_mask.offsets) and torch.equal(by_bounds.index, by_mask.index)
    assert by_bounds.longest.shape == by_mask.longest.shape and by_bounds.real == by_mask.real == 6


@pytest.mark.parametrize("bounds", [(), (0,), (1, 4), (0, 3, 3), (0, 4, 2)])
def test_these_are_no_bounds(bounds):
    assert read_offsets(torch.tensor(bounds, dtype=torch.int32)).documents is None


def both_ways(real: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    return ((document[:, :, None] == document[:, None, :]) & real[:, None, :])[:, None]


@pytest.mark.parametrize("length", [6, 7, 8])
def test_documents_that_are_not_causal(length):
    document = torch.tensor([[0, 0, 1, 1, 1, 2, 9, 9], [0, 1, 1, 1, 1, 1, 9, 9]])[:, :length]
    mask = both_ways(document < 9, document)
    found = read_mask(mask, (BOTH_WAYS,), None).documents
    assert torch.equal(found.real, document < 9) and found.documents == 5 and found.longest == 5
    assert found.window == BOTH_WAYS
    assert read_mask(mask, (0, 3), None).documents is None
    for place in ((0, 0, 0, 4), (0, 0, 3, 2), (1, 0, 0, 1)):
        assert read_mask(_but_one(mask, *place), (BOTH_WAYS,), None).documents is None
    assert read_mask(causal(document < 9, document), (BOTH_WAYS,), None).documents is None


def test_windows_both_ways():
    document = torch.tensor([[0, 0, 1, 1, 1, 1, 9, 9], [0, 1, 1, 1, 1, 1, 1, 9]])
    place = torch.arange(8)
    mask = both_ways(document < 9, document) & ((place[:, None] - place).abs() < 3)
    assert read_mask(mask, (-3, BOTH_WAYS), None).documents.window == -3
    for others in ((-2, BOTH_WAYS), (-4, BOTH_WAYS), (3, 0)):
        assert read_mask(mask, others, None).documents is None
    assert read_mask(both_ways(document < 9, document), (-3, BOTH_WAYS), None).documents.window == BOTH_WAYS


def _but_one(mask: torch.Tensor, *place: int) -> torch.Tensor:
    mask = mask.clone()
    mask[place] = ~mask[place]
    return mask


FULL = torch.ones(2, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 1, 6, 6, dtype=torch.bool),
        causal(FULL) | (torch.arange(6) < 2),
        _but_one(causal(FULL), 1, 0, 5, 2),
        _but_one(causal(FULL), 0, 0, 1, 4),
        _but_one(causal(FULL), 0, 0, 5, 0),
        causal(FULL, window=4),
        torch.zeros(2, 1, 6, 6, dtype=torch.bool),
        causal(torch.tensor([[1, 1, 0, 1, 1, 1]] * 2).bool()),
        causal(FULL) & (torch.arange(6) % 2 == 0),
    ],
    ids=["both ways", "a prefix", "a hole", "ahead", "far away", "another window", "nothing", "interrupted", "strided"],
)
def test_what_is_no_mask_of_documents(mask):
    assert read_mask(mask, (3, 0), None).documents is None


def test_one_element_makes_the_difference():
    """Whichever it is, of those that real tokens read."""
    real = rows(6, 4, length=6)
    mask = causal(real)
    whole = read_mask(mask, (0,), None).documents
    for row in range(2):
        for query in range(6):
            for key in range(6):
                found = read_mask(_but_one(mask, row, 0, query, key), (0,), None).documents
                same = found is not None and torch.equal(found.real, whole.real) and found.documents == whole.documents
                assert same == (row == 1 and query >= 4 and query != key), (row, query, key)


def test_labels_that_count_at_padding():
    real = rows(5, 3, length=5)
    labels = torch.where(real, 7, -100)
    labels[:, 0] = -100
    for change, expected in ((None, False), ((1, 3), True), ((1, 4), True), ((0, 4), False)):
        given = labels.clone()
        if change is not None:
            given[change] = 7
        assert read_mask(causal(real), (0,), given).labelled == expected, change
        assert read_padding(real, given).labelled == expected, change


@pytest.mark.parametrize("at_once", [1, 40, 1 << 26])
def test_large_masks_are_compared_in_parts(at_once, monkeypatch):
    from tunecompile.runtime.unpad import documents

    monkeypatch.setattr(documents, "AT_ONCE", at_once)
    real = rows(6, 2, 5, length=6)
    assert read_mask(causal(real), (0,), None).documents.count == 13
    assert read_mask(_but_one(causal(real), 2, 0, 4, 1), (0,), None).documents is None
