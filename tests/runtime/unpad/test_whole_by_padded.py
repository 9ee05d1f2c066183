"""Rows without padding between padded batches: by the graph that these have, and gradients are eager's."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_close
from tests.support.models import hybrids
from tests.support.models.pairs import attending, pair
from tests.support.notes import fell_back, has
from tests.support.rounding import Shapes, kernels_have_windows, whole
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.rounding import rounding
from tunecompile.runtime.unpad.rounding.attention import KnownAttention, WithoutMask, is_alike, switches_of
from tunecompile.runtime.watch.traced_graph import TracedGraph

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
EXACT = dict(loss=1e-6, limit=1e-6)  #: of models in fp64, whose norms and losses are in fp32


@pytest.fixture
def shapes(monkeypatch):
    return Shapes.of(monkeypatch)


def masked(batch: dict) -> dict:
    """With a mask of ones, as collators give it."""
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def follow(ours, plain, batches, **limits) -> None:
    for batch in batches:
        assert_close(zoo.step(ours, dict(batch)), zoo.step(plain, dict(batch)), **limits)


def test_two_graphs_serve_all_batches(shapes):
    """GPT-2's layers are given their mask by position."""
    ours, plain = pair(lambda: attending().double())
    follow(ours, plain, [whole(20), padded(), padded(3, 24, "left"), whole(24), whole(9, 5), whole(20)], **EXACT)
    rows = [shape for shape in shapes.last(6) if shape[0] != 1]
    assert rows == [(2, 20, 64)] * 2  # the first ones, which have constant sizes
    region = tunecompile.report(ours).regions[0]
    assert region.compiles == 2 and not fell_back(ours), region
    assert has(ours, "whole-by-padded", count=2) and has(ours, "padding-removed", count=2)


def test_one_graph_serves_all_batches_where_padded_ones_come_first(shapes):
    """A model that is given a mask of ones leaves it out where it may know."""
    ours, plain = pair(lambda: attending().double())
    batches = [padded(), masked(whole(20)), padded(3, 24, "left"), masked(whole(9, 5)), padded(), masked(whole(20))]
    follow(ours, plain, batches, **EXACT)
    assert all(shape[0] == 1 for shape in shapes.last(len(batches)))
    region = tunecompile.report(ours).regions[0]
    assert region.compiles == 1 and not fell_back(ours), region
    assert has(ours, "whole-by-padded", count=3)


def test_windows_that_are_constants_of_graphs(shapes):
    """No row is as long as the first one. Of rows longer than the second the model makes a mask itself."""
    ours, plain = pair(lambda: attending(family="mistral", sliding_window=32).double())
    follow(ours, plain, [whole(20), padded(), padded(3, 24, "left"), whole(24), whole(9, 5), whole(20)], **EXACT)
    assert tunecompile.report(ours).regions[0].compiles == 2 and not fell_back(ours)
    assert has(ours, "padding-removed", count=2) and has(ours, "whole-by-padded", count=2)


@pytest.mark.slow
def test_others_that_have_a_graph_stay_with_it(shapes):
    ours, plain = pair()
    follow(ours, plain, [whole(20), whole(24), padded(), whole(26)])
    assert shapes.last(1) == [(2, 26, 64)] and not has(ours, "whole-by-padded")


@pytest.mark.slow
def test_many_get_a_graph_of_their_own(shapes, monkeypatch):
    monkeypatch.setattr(rounding, "OFTEN", 2)
    ours, plain = pair()
    follow(ours, plain, [whole(20), padded(), whole(24), whole(26), whole(28), whole(24)])
    assert [shape[0] for shape in shapes.last(4)] == [1, 1, 2, 2] and has(ours, "whole-by-padded", count=2)


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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "bamba", "nemotron_h", "falcon_h1"])
def test_hybrids_are_told_of_tokens_that_are_real(shapes, family):
    """By a mask of rows, of pairs, by both (Falcon H1), or by none where a layer is an MLP (Nemotron H)."""
    ours, plain = pair(lambda: hybrids.make(family))
    follow(ours, plain, [whole(20), padded(), padded(3, 24, "left"), whole(24), whole(9, 5), whole(20)], limit=1e-5)
    assert all(region.compiles == 2 for region in tunecompile.report(ours).regions) and not fell_back(ours)
    assert has(ours, "whole-by-padded", count=2) and has(ours, "padding-removed", count=2)


@pytest.mark.slow
@pytest.mark.parametrize("family, window, graphs", [("gemma3", 6, 3), ("gemma4", 6, 3), ("gemma4", 64, 4)])
def test_full_layers_beside_those_with_a_window(shapes, family, window, graphs, monkeypatch):
    """A GPU's kernels have windows, so that these layers run as documents from the first batch on. Gemma 4's hand on
    keys, whose first stride is any.
    """
    kernels_have_windows(monkeypatch)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window, "num_hidden_layers": 2}
    ours, plain = pair(lambda: zoo.adapt(zoo.make(family, **kinds), r=4).double())
    follow(ours, plain, [whole(20), padded(), whole(24), whole(9, 5), whole(20)], loss=1e-6, limit=1e-6)
    assert tunecompile.report(ours).compiles == graphs and not fell_back(ours), tunecompile.report(ours)
    assert has(ours, "whole-by-padded", count=2)
