"""How a layer is told of padding, and rows without any alike."""

import torch

from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.told import Told

CPU = torch.device("cpu")
HIDDEN = torch.randn(2, 6, 4)
REAL = torch.ones(2, 6, dtype=torch.int64)
PAIRS = torch.ones(2, 1, 6, 6, dtype=torch.bool)


def rows(window: int = 0, **changes) -> FlatBatch:
    made = FlatBatch.of_whole_rows(2, 6, window, CPU)
    return made if not changes else FlatBatch(**{**vars(made), **changes})


def test_what_padded_batches_gave():
    def told(flat=None, **kwargs):
        return Told.of(rows(4) if flat is None else flat, (HIDDEN,), kwargs)

    assert told() == told(attention_mask=None) == Told(4, False, ())
    assert told(attention_mask=PAIRS) == Told(4, True, ())
    assert told(attention_mask=REAL) == Told(4, False, (("attention_mask", torch.int64),))
    both = told(attention_mask=PAIRS, mamba_attention_mask=REAL == 1, position_ids=REAL)
    assert both == Told(4, True, (("mamba_attention_mask", torch.bool),))
    assert told(attention_mask=REAL[:1]) == Told(4, False, ()), "of another batch"
    assert told(rows(4, fills="attention_mask")).pairs


def test_whole_rows_are_told_alike():
    by_pairs, by_rows = Told(0, True, ()), Told(0, False, (("attention_mask", torch.int64), ("more", torch.bool)))
    _, kwargs = by_pairs.tell(rows()).enter((HIDDEN,), {"attention_mask": None}, None, False)
    assert kwargs["attention_mask"] is None and kwargs["document_masks"] == ("attention_mask",)
    flat = by_rows.tell(rows())
    _, kwargs = flat.enter((HIDDEN,), {"attention_mask": None, "other": None}, None, False)
    assert kwargs["document_masks"] == () and kwargs["other"] is None and "more" not in kwargs
    ones = kwargs["attention_mask"]
    assert ones.shape == (1, 16) and ones.dtype == torch.int64 and ones.all()
    _, again = by_rows.tell(rows(rows=flat.rows)).enter((HIDDEN,), {"attention_mask": None}, None, False)
    assert again["attention_mask"] is ones, "made once for all layers"
    flat.forget()
    assert not flat.rows.ones


def test_windows_that_narrow_nothing():
    told = Told(6, True, ())
    assert told.tell(rows()).window == 6
    assert Told(5, True, ()).tell(rows()).window == 0, "such a row would be seen less of"
