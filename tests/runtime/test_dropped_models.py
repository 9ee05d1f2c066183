"""A model that was optimized, trained and dropped leaves nothing behind, however many come after each other."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch.fx import Graph, GraphModule

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import of_plain_layers
from tunecompile._torch.fake_tensors import FakeTensor

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(memory):
    model = zoo.make("llama", num_hidden_layers=2).train()
    tunecompile.optimize(model, memory=memory, executor="eager")
    for _ in range(2):
        model(**zoo.batch()).loss.backward()
    return weakref.ref(model)


def left():
    gc.collect()
    found = Counter(map(type, gc.get_objects()))
    return {kind.__name__: found[kind] for kind in (FakeTensor, Graph, GraphModule)}


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, "1KiB"])
def test_graphs_of_dropped_models_are_freed(memory):
    counts = []
    for _ in range(3):
        model = trained(memory)
        counts.append(left())
        assert model() is None
    assert all(counts[2][kind] <= counts[1][kind] <= counts[0][kind] for kind in counts[0]), counts
    assert not any(name.startswith("__compiled_fn") for name in vars(tunecompile.runtime.layers.variant))


def test_other_models_keep_their_graphs():
    model, other = (of_plain_layers().train() for _ in range(2))
    for each in (model, other):
        tunecompile.optimize(each, executor="eager")(**zoo.batch()).loss.backward()
    del each, other
    gc.collect()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model(**zoo.batch()).loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
