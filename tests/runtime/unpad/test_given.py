"""Which argument of a layer is its mask, or says what a mask would."""

import torch
from torch import nn

from tests.support.batches import lengths_mask
from tunecompile.runtime.unpad.masks import given as given_module
from tunecompile.runtime.unpad.masks.given import bounds_in, is_given, mask_in, padding_in, place_of_mask
from tunecompile.runtime.unpad.masks.one_form import in_one_form


def test_masks_among_the_arguments():
    hidden, mask = torch.zeros(2, 6, 3), torch.ones(2, 1, 6, 6, dtype=torch.bool)
    assert mask_in((hidden, mask), {}) is mask and mask_in((hidden,), {"m": mask.float()}) is not None
    for others in ((mask, mask.clone()), (mask.int(),), (mask[:1],), (mask.float().requires_grad_(),), ()):
        assert mask_in((hidden, *others), {}) is None
    assert mask_in((hidden[0], mask), {}) is None and mask_in((), {}) is None
    rows = lengths_mask(4, 6)
    assert padding_in((hidden,), {"attention_mask": rows}) is rows
    for wrong in (rows[:, :5], rows.float(), None):
        assert padding_in((hidden,), {"attention_mask": wrong}) is None
    assert padding_in((hidden[0],), {"attention_mask": rows}) is None
    given = {"attention_mask": rows, "n": 1}
    assert is_given(rows[:1], given) and not is_given(rows.clone(), given) and not is_given(rows, {"n": 1})
    assert padding_in((), {"attention_mask": 1}) is None and padding_in((hidden, rows), {}) is None


def test_bounds_that_attention_is_given_without_a_mask(monkeypatch):
    """Granite 4's layers: attention beside scans, in one file. Where anything is unlike that, layers see what they saw."""
    monkeypatch.setattr(given_module, "knows_documents", lambda layer: layer is not other)
    attends, scans, other = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    attends.is_causal, scans.is_causal, other.is_causal = True, False, True
    hidden, bounds = torch.zeros(1, 6, 3), torch.tensor([0, 2, 6], dtype=torch.int32)
    given = {"attention_mask": None, "cu_seq_lens_q": bounds}
    assert bounds_in(attends, (hidden,), given) is bounds and bounds_in(attends, (), {"x": hidden, **given}) is bounds
    assert bounds_in(scans, (hidden,), given) is None and bounds_in(other, (hidden,), given) is None
    for wrong in (hidden[0], hidden[:, 0], hidden.expand(2, 6, 3), None):
        assert bounds_in(attends, (wrong,), given) is None
    for name, value in (("attention_mask", lengths_mask(6)), ("cu_seq_lens_q", bounds[None]), ("cu_seq_lens_q", 6)):
        assert bounds_in(attends, (hidden,), {**given, name: value}) is None
    assert bounds_in(attends, (hidden,), {"cu_seq_lens_q": bounds}) is None, "it may have attention of another kind"


class Layer(nn.Module):
    def forward(self, hidden, cache=None, attention_mask=None, **kwargs):
        return hidden


def test_where_a_mask_is_given():
    layer, args = Layer(), (torch.zeros(2, 6, 3), None, None)
    assert place_of_mask(layer, args[:1], {"attention_mask": None}) == "attention_mask"
    assert place_of_mask(layer, args, {}) == 2 and place_of_mask(layer, args[:2], {}) is None
    assert place_of_mask(nn.Linear(1, 1), args, {}) is None


def test_masks_of_one_row_are_written_out_once_for_all_layers():
    one, rows = torch.ones(1, 1, 6, 6, dtype=torch.bool).expand(2, 1, 6, 6), torch.ones(2, 1, 6, 6, dtype=torch.bool)
    call = type("Call", (), {"masks_in_one_form": {}})()
    (hidden, first), named = in_one_form(call, (torch.zeros(2, 6, 4), one), {"mask": one, "other": rows})
    (_, second), _ = in_one_form(call, (hidden, one), {})
    assert first is second is named["mask"] and first.is_contiguous() and not first._is_view() and first.equal(one)
    assert named["other"] is rows
    (view,), _ = in_one_form(None, (rows[:, :, :],), {})
    assert not view._is_view() and view.data_ptr() == rows.data_ptr()
