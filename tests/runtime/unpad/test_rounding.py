"""Rows without padding whose lengths change: rounded up, so that layers see few shapes, and gradients are eager's."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.rounding import Shapes, waited_for
from tunecompile.notes import note
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.owner_call import OwnerCall
from tunecompile.runtime.unpad.rounding.rounding import Rounding
from tunecompile.runtime.unpad.sizes import PARTS, SizesSeen, rounded_up
from tunecompile.runtime.watch.traced_graph import TracedGraph

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = dict(loss=1e-6, limit=1e-6)  #: of models in fp64, whose norms and losses are in fp32
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    waited_for(monkeypatch)


@pytest.fixture
def shapes(monkeypatch):
    return Shapes.of(monkeypatch)


def test_sizes_whose_launches_are_waited_for(monkeypatch):
    """Of a GPU: until it is known that the device is busy with so many."""
    monkeypatch.undo()
    sizes, gpu = SizesSeen(GraphReplays()), torch.device("cuda")
    sizes.first = (2, 9)

    def pays(tokens, device):
        return sizes.recording_pays((1, tokens), tokens, device)

    assert pays(40, gpu) and not pays(40, CPU), "nothing is recorded there"
    assert sizes.waited == 0
    sizes.replays.last_waits = lambda: True
    sizes.learn(40)
    assert pays(500, gpu) and pays(500, CPU) and sizes.waited > 500, "of any larger size, too"
    sizes.replays.last_waits = lambda: False
    sizes.learn(45)
    assert pays(44, gpu) and not pays(45, gpu) and sizes.waited == 45
    sizes.learn(40)
    assert not pays(40, gpu) and pays(39, gpu)
    sizes.replays = None
    assert not pays(39, gpu)


def test_launches_are_known_of_each_size_that_came_as_it_is(monkeypatch):
    monkeypatch.undo()
    made, layer = Rounding(None, tuple, None, GraphReplays()), nn.Linear(1, 1)
    made.sizes.replays.last_waits = lambda: True
    made.attention.looked.add(layer)
    made.came(layer, (torch.randn(2, 30, 3),), {}, None)
    assert made.sizes.waits == 60


def test_the_first_size_is_that_of_a_training_step():
    sizes = SizesSeen(GraphReplays())
    sizes.waits = 1 << 30
    assert not sizes.recording_pays((2, 20), 40, CPU)
    sizes.came((2, 9), trains=False)
    assert sizes.first is None
    for size in ((2, 20), (2, 24)):
        assert not sizes.apart
        sizes.came(size, trains=True)
    assert sizes.apart and sizes.recording_pays((2, 24), 48, CPU) and not sizes.recording_pays((2, 20), 40, CPU)


# -- where sizes stay ----------------------------------------------------------------------------------------------------


def test_more_attention_of_documents_than_was_causal():
    """Some of it saw all tokens where it was given no mask."""
    made, layer, flat = Rounding(None, tuple, None, None), nn.Linear(1, 1), FlatBatch.of_whole_rows(2, 6, 0, CPU)
    call = (torch.randn(2, 6, 3),), {"attention_mask": None, "n": 3, "none": None}
    graph = graph_with(attention=1)
    made.came(layer, *call, graph)
    wrong = replace(graph, by_documents=2), replace(graph, by_documents=1, recurrences=1)
    made.ran(layer, flat, *call, wrong[0])  # no batch of ours
    flat.rounds = True
    for each in wrong:
        assert made.ran(layer, flat, *call, each).code == "own-mask"
    right = replace(graph, by_documents=1)
    assert made.ran(layer, flat, *call, right) is None
    by_the_mask = replace(right, operations=(*graph.operations, ("mul", "mask")))
    assert made.ran(layer, flat, *call, by_the_mask) is None
    adapted = replace(graph, operations=(*graph.operations, (str(nn.functional.linear),)))
    assert right.covers(adapted), "adapters are switched off"
    less = replace(right, operations=graph.operations[1:])
    assert made.ran(layer, flat, *call, less) is not None, "it did more without a mask"
    assert made.ran(layer, flat, call[0], {**call[1], "n": 4}, right) is not None, "another kind of call"


def test_calls_that_are_not_rounded():
    layer, args = nn.Linear(1, 1), (torch.randn(2, 6, 3),)
    made = Rounding(None, lambda: (layer,), Watch(), GraphReplays())
    made.sizes.first, made.sizes.waits = (2, 4), 1 << 30
    made.came(layer, args, {"attention_mask": None}, graph_with(attention=1))

    def batch(given=args, call=None, **kwargs):
        return made.batch_of(call or OwnerCall({}, rounds=True), layer, given, {"attention_mask": None, **kwargs})

    assert batch().shape == (2, 6) and batch().fills == "attention_mask" and len(batch().index) == 64
    assert made.batch_of(None, layer, args, {"attention_mask": None}) is None
    for refused in (
        {"attention_mask": torch.ones(2, 6)},
        {"cu_seq_lens_q": torch.tensor([0, 12])},
        {"is_causal": True},
        {"given": (torch.randn(12, 3),)},
        {"given": ()},
        {"call": OwnerCall({})},
        {"call": OwnerCall({}, rounds=True, sized=True)},
        {"call": OwnerCall({}, rounds=True, trains=False)},
        {"more": 3},
    ):
        assert batch(**refused) is None, refused
    assert made.batch_of(OwnerCall({}, rounds=True), layer, args, {}) is None, "a mask may be by position"
    call = OwnerCall({}, rounds=True)
    assert batch(call=call) is batch(call=call) and call.whole
    assert batch((torch.randn(2, 7, 3),), call=call) is None, "other tokens than those of the layers before it"
    made.watch = Watch(note("hook-on-all-modules"))
    assert batch() is None and made.report()[0].code == "sizes-kept"
    made.watch = Watch()
    made.refuse(note("own-mask"))
    assert batch() is None


def graph_with(attention, recurrences=0, alone=True):
    attend = str(nn.functional.scaled_dot_product_attention)
    return TracedGraph((("mean", 1), (attend, "True")), False, causal=attention, recurrences=recurrences, alone=alone)


@pytest.mark.parametrize("graph", [graph_with(None), graph_with(1, 1), graph_with(0, 1), graph_with(1, alone=False)])
def test_layers_that_a_mask_of_pairs_does_not_tell(graph):
    """Of attention that is not causal, of recurrences, of what other graphs of the layer have."""
    layer, args = nn.Linear(1, 1), (torch.randn(2, 6, 3),)
    made = Rounding(None, lambda: (layer,), Watch(), GraphReplays())
    made.sizes.first, made.sizes.waits = (2, 4), 1 << 30
    made.came(layer, args, {"attention_mask": None}, graph)
    assert made.batch_of(OwnerCall({}, rounds=True), layer, args, {"attention_mask": None}) is None


class Watch:
    def __init__(self, why=None):
        self.why = why

    def reason(self):
        return self.why


def test_sizes_are_rounded_to_parts_of_powers_of_two():
    device = torch.device("cpu")
    for count in range(1, 5000, 7):
        made = rounded_up(count, device)
        assert count <= made < count + max(64, count / PARTS) and made % 64 == 0
    sizes = {rounded_up(count, device) for count in range(2048, 4097)}
    assert len(sizes) == PARTS + 1 and {4096, 2048, 2304} <= sizes
