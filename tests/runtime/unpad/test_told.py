"""How a layer is told of padding, and rows without any alike."""

from dataclasses import replace

import torch
from torch import nn

from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.masks.given import place_of_mask
from tunecompile.runtime.unpad.rounding.told import Told

CPU = torch.device("cpu")
HIDDEN = torch.randn(2, 6, 4)
REAL = torch.ones(2, 6, dtype=torch.int64)
PAIRS = torch.ones(2, 1, 6, 6, dtype=torch.bool)


class Layer(nn.Module):
    def forward(self, hidden, cache=None, attention_mask=None, **kwargs):
        return hidden


def test_where_a_mask_is_given():
    layer, args = Layer(), (HIDDEN, None, None)
    assert place_of_mask(layer, args[:1], {"attention_mask": None}) == "attention_mask"
    assert place_of_mask(layer, args, {}) == 2 and place_of_mask(layer, args[:2], {}) is None
    assert place_of_mask(nn.Linear(1, 1), args, {}) is None


def rows(window: int = 0, **changes) -> FlatBatch:
    return replace(FlatBatch.of_whole_rows(2, 6, window, CPU), **changes)


def test_what_padded_batches_gave():
    def told(*args, flat=None, **kwargs):
        return Told.of(Layer(), rows(4) if flat is None else flat, (HIDDEN, *args), kwargs)

    assert told() == told(attention_mask=None) == Told(4, "", ())
    assert told(attention_mask=PAIRS) == Told(4, "attention_mask", ())
    assert told(None, PAIRS) == Told(4, 2, ()), "by position"
    assert told(attention_mask=REAL) == Told(4, "", (("attention_mask", torch.int64),))
    both = told(attention_mask=PAIRS, mamba_attention_mask=REAL == 1, position_ids=REAL)
    assert both == Told(4, "attention_mask", (("mamba_attention_mask", torch.bool),))
    assert told(attention_mask=REAL[:1]) == Told(4, "", ()), "of another batch"
    assert told(flat=rows(4, fills="attention_mask")).pairs == "attention_mask"


def test_whole_rows_are_told_alike():
    by_pairs, by_rows = (
        Told(0, "attention_mask", ()),
        Told(0, "", (("attention_mask", torch.int64), ("more", torch.bool))),
    )
    _, kwargs = by_pairs.tell(rows()).enter((HIDDEN,), {"attention_mask": None}, None, False)
    assert kwargs["attention_mask"] is None and kwargs["document_masks"] == ("attention_mask",)
    args, kwargs = Told(0, 1, ()).tell(rows()).enter((HIDDEN, None), {}, None, False)
    assert args[1] is None and kwargs["document_masks"] == (1,)
    flat = by_rows.tell(rows())
    _, kwargs = flat.enter((HIDDEN,), {"attention_mask": None, "other": None}, None, False)
    assert kwargs["document_masks"] == () and kwargs["other"] is None and "more" not in kwargs
    ones = kwargs["attention_mask"]
    assert ones.shape == (1, 16) and ones.dtype == torch.int64 and ones.all()
    _, again = by_rows.tell(rows(rows=flat.rows)).enter((HIDDEN,), {"attention_mask": None}, None, False)
    assert again["attention_mask"] is ones, "made once for all layers"
    flat.rows.forget()
    assert not flat.rows.ones


def test_windows_that_narrow_nothing():
    told = Told(6, "attention_mask", ())
    assert told.tell(rows()).window == 6
    assert Told(5, "attention_mask", ()).tell(rows()).window == 0, "such a row would be seen less of"
