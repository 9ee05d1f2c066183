"""Whole rows that are presumed where masks said so before, and read behind the layers. No model runs."""

from types import SimpleNamespace

import torch
from torch import nn

from tests.support.decisions import Watch, whole_rows
from tunecompile.runtime.unpad.decision import UnpadDecision
from tunecompile.runtime.unpad.masks import presume as presuming
from tunecompile.runtime.unpad.masks.presume import AFTER, SURPRISES, Presumptions


def added_mask(whole=True):
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    if not whole:
        seen[1, :, :, 4:] = False
        seen[1, :, 4:] = False
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def test_whole_rows_are_presumed_after_some(monkeypatch):
    layer, other, made = nn.Linear(1, 1), nn.Linear(1, 1), Presumptions()
    for count in range(AFTER):
        assert made.presume(layer, added_mask(), Watch(), []) is None, count
        made.learn(layer, whole_rows())
    decision, presumed = made.presume(layer, added_mask(), Watch(), [])
    assert decision.flat.whole and decision.flat.shape == (2, 6) and presumed.flat.window == 0 and presumed.holds()
    assert made.presume(other, added_mask(), Watch(), []) is None
    assert made.presume(layer, added_mask(), Watch("looks"), []) is None
    assert made.presume(layer, added_mask() == 0, Watch(), [])[1].holds(), "of bools, of a window on a GPU, say"
    monkeypatch.setattr(presuming, "several", lambda: True)
    assert made.presume(layer, added_mask(), Watch(), []) is None
    monkeypatch.undo()
    made.learn(layer, UnpadDecision())
    assert made.presume(layer, added_mask(), Watch(), []) is None and AFTER == 3


def test_a_presumed_mask_that_is_written_to_holds_no_more():
    """What it said when layers ran is not known: it is read behind the first of them."""
    layer, made = nn.Linear(1, 1), Presumptions()
    for _ in range(AFTER):
        made.learn(layer, whole_rows())
    for written, read_first, holds in ((False, False, True), (True, False, False), (True, True, True)):
        mask = added_mask()
        _, presumed = made.presume(layer, mask, Watch(), [])
        assert presumed.pending is None and presumed.mask is mask
        if read_first:
            presumed.read()
        if written:
            mask += 0.0
        assert presumed.holds() is holds and presumed.mask is None


def test_another_window_is_counted_anew():
    layer, made = nn.Linear(1, 1), Presumptions()
    for window in (0, 0, 4, 4):
        made.learn(layer, whole_rows(window))
    assert made.seen[layer] == (4, 2) and made.presume(layer, added_mask(), Watch(), []) is None
    made.learn(layer, whole_rows(4))
    _, presumed = made.presume(layer, added_mask(), Watch(), [])
    assert presumed.flat.window == 4 and not presumed.holds(), "the mask sees further back"


def test_layers_of_other_windows_read_the_same_rows():
    """Gemma's and gpt-oss's layers alternate: a row is made once, and who looks at hidden states is asked once."""
    near, far, made, asked = nn.Linear(1, 1), nn.Linear(1, 1), Presumptions(), []
    for _ in range(AFTER):
        made.learn(near, whole_rows(4))
        made.learn(far, whole_rows())
    watch = SimpleNamespace(reason=lambda: asked.append(1))
    first = made.presume(near, added_mask(), watch, [])
    second = made.presume(far, added_mask(), watch, [first[1]])
    one, other = first[0].flat, second[0].flat
    assert (one.window, other.window) == (4, 0) and one.rows is other.rows and one.index is other.index
    assert asked == [1] and second[1].holds() and not first[1].holds(), "each mask is read by its own window"
    longer = made.presume(far, added_mask()[:, :, :4, :4], watch, [first[1]])
    assert longer[0].flat.shape == (2, 4) and longer[0].flat.rows is not one.rows
    hidden, table = torch.randn(2, 6, 3), torch.randn(2, 6, 2)
    (row, tables), _ = one.enter((hidden, table), {}, None, keep=True)
    padded = one.leave(row * 2, keep=True)
    (again, same), _ = other.enter((padded, table), {}, None, keep=True)
    assert torch.equal(again, row * 2) and again.data_ptr() == padded.data_ptr() and same is tables


def test_surprises_end_presumptions():
    layer, made = nn.Linear(1, 1), Presumptions()
    for surprises in range(SURPRISES):
        for _ in range(AFTER):
            made.learn(layer, whole_rows())
        _, presumed = made.presume(layer, added_mask(whole=False), Watch(), [])
        assert not presumed.holds() and not made.hold([presumed]) and made.surprises == surprises + 1 and not made.seen
    assert made.hold([])
    for _ in range(AFTER):
        made.learn(layer, whole_rows())
    assert made.presume(layer, added_mask(), Watch(), []) is None
