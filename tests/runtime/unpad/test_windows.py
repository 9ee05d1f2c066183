"""Whole rows whose attention has a window, where kernels have windows, as a GPU's do: no layer reads a mask of bools."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.reports import as_documents, flattened
from tests.support.rounding import Shapes, kernels_have_windows, waited_for, whole

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

WINDOW = 6
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Those of a GPU have windows; a CPU's do not."""
    kernels_have_windows(monkeypatch)


def windowed():
    return attending(family="mistral", sliding_window=WINDOW, use_cache=False)


def test_they_run_as_documents():
    """Steps of one size, so that masks are presumed in the end; then others, with padding among them, and shorter rows."""
    model, reference = pair(lambda: windowed().double())
    for seed in range(5):
        assert_same_flattened(model, reference, zoo.batch(256, 2, 20, seed=seed), limit=1e-6)
    for inputs in (whole(28, 3), padded(3, 25), whole(WINDOW), whole(35), whole(20)):
        assert_same_flattened(model, reference, inputs, limit=1e-6)
    assert as_documents(model) == 8 and flattened(model) == 1
    assert tunecompile.report(model).compiles <= 3, tunecompile.report(model)


@pytest.mark.slow
def test_full_layers_beside_them_are_rounded_up(monkeypatch):
    """Those have no mask, and so another row of the same batch."""
    waited_for(monkeypatch)
    shapes = Shapes.of(monkeypatch)
    model, reference = pair(lambda: zoo.make("gemma3", **MIXED, use_cache=False).double())
    for length in (WINDOW - 1, WINDOW, 20, 23, 26, 29, 32):
        assert_same_flattened(model, reference, whole(length), limit=1e-6)
    assert as_documents(model) >= 5
    assert any(shape[0] == 1 for _, shape in shapes.seen)


def test_somebody_who_looks_gets_whole_rows():
    """And nothing is told of it: the mask says the same."""
    model, reference = pair(windowed)
    seen = []
    for each in (model, reference):
        each.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape[:2]))
    assert_same_flattened(model, reference, whole(20))
    assert not as_documents(model) and seen == [torch.Size([2, 20])] * 2
    assert not [note for note in tunecompile.report(model).notes if note.code == "packing-kept"]
