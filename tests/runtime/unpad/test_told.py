"""How a layer is told of padding, and rows without any alike; and what is known of how it attends without a mask."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.rounding.attention import KnownAttention, WithoutMask, is_alike, switches_of
from tunecompile.runtime.unpad.rounding.told import Told
from tunecompile.runtime.watch.traced_graph import TracedGraph

CPU = torch.device("cpu")
HIDDEN = torch.randn(2, 6, 4)
REAL = torch.ones(2, 6, dtype=torch.int64)
PAIRS = torch.ones(2, 1, 6, 6, dtype=torch.bool)


class Layer(nn.Module):
    def forward(self, hidden, cache=None, attention_mask=None, **kwargs):
        return hidden


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


@pytest.mark.parametrize("causal", [True, False])
def test_switches_that_were_turned_since(causal):
    """An attribute says whether attention is causal: what was learnt holds as long as it does."""
    layer, graph = nn.Linear(1, 1), TracedGraph((), True, causal=1 if causal else None, both_ways=None if causal else 1)
    layer.is_causal = causal
    known = WithoutMask(switches_of(layer))
    known.calls[("kind",)] = graph
    assert known.runs(("kind",)) is graph and known.runs(("other",)) is None
    layer.is_causal = not causal
    assert known.runs(("kind",)) is None


@pytest.mark.parametrize("both_ways", [False, True])
def test_rows_see_as_far_as_they_did(both_ways):
    """As many calls see all tokens, or what stands before each, in both graphs."""
    whole = TracedGraph((), True, causal=None if both_ways else 1, both_ways=1 if both_ways else None)
    flat = TracedGraph((), True, by_documents=1)
    assert is_alike(whole, flat, both_ways) and not is_alike(whole, flat, not both_ways)
    assert not is_alike(whole, replace(flat, by_documents=2), both_ways)


def test_graphs_that_no_padded_batch_ran_by():
    """A layer was changed since it was known how it attends without a mask."""
    made, layer = KnownAttention(None, tuple), nn.Linear(1, 1)
    graph, changed = TracedGraph((("attention",),), True), TracedGraph((("other attention",),), True)
    flat = replace(FlatBatch.of_whole_rows(2, 6, 0, CPU), joins=True)
    assert made.ran(layer, flat, (), {}, graph).code == "own-mask"
    made.ran(layer, replace(flat, joins=False, real=5), (), {}, graph)  # with padding
    assert made.ran(layer, flat, (), {}, graph) is None
    assert made.ran(layer, flat, (), {}, TracedGraph(graph.operations, True)) is None, "under another plan"
    assert made.ran(layer, flat, (), {}, changed).code == "own-mask"
