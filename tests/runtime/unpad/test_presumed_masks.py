"""Masks of whole rows that are presumed, so that no step waits for them, and read behind layers."""

import pytest

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import find
from tests.support.reports import flattened
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.unpad import decision
from tunecompile.runtime.unpad.masks import presume
from tunecompile.runtime.unpad.masks.presume import AFTER, SURPRISES
from tunecompile.runtime.unpad.prefixes import search

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_whole_rows_are_presumed_and_others_are_run_again(monkeypatch):
    """No wait for the device after some batches of whole rows; a batch with padding has its own numbers all the same."""
    waits, read = [], decision.read_mask
    monkeypatch.setattr(decision, "read_mask", lambda *given: waits.append(1) or read(*given))
    monkeypatch.setattr(search, "FEW", 1000)  # looks for prefixes that rows share wait, too
    model, reference = pair(lambda: attending(use_cache=False, attn_implementation="eager"))
    for seed in range(AFTER + 2):
        assert_same_flattened(model, reference, zoo.batch(256, 2, 16, seed=seed))
        assert len(waits) == min(seed + 1, AFTER)
    for turn in range(SURPRISES + 1):
        assert_same_flattened(model, reference, padded(seed=turn))
        for seed in range(AFTER + 1):
            assert_same_flattened(model, reference, zoo.batch(256, 3, 10, seed=seed))
    assert len(waits) == AFTER + (SURPRISES - 1) * (AFTER + 1) + 2 * (AFTER + 2)
    assert flattened(model) == SURPRISES + 1 and not find(model, "padding-kept"), tunecompile.report(model)


def test_presumed_masks_are_read_behind_layers(monkeypatch):
    """On a GPU some forty small launches would stand before the first, or before the second while the device is done
    with the first: for both it would wait."""
    done, read, ran = [], presume.begin_reading, LayerSlot._run_as
    monkeypatch.setattr(presume, "begin_reading", lambda *given: done.append("mask") or read(*given))
    monkeypatch.setattr(LayerSlot, "_run_as", lambda *given: done.append("layer") or ran(*given))
    made = attending(use_cache=False, attn_implementation="eager", num_hidden_layers=3)
    model = tunecompile.optimize(made, executor="eager")
    layers = 0
    for seed in range(AFTER + 1):
        assert "mask" not in done
        layers = max(layers, len(done))
        done.clear()
        zoo.step(model, zoo.batch(256, 2, 8, seed=seed))
    assert done == ["layer", "layer", "mask", "layer"] and layers == 3


def test_a_rank_never_runs_layers_again_by_itself(monkeypatch):
    """Others would wait for its collectives."""
    seen, read = [], decision.read_mask
    monkeypatch.setattr(decision, "read_mask", lambda *given: seen.append(1) or read(*given))
    monkeypatch.setattr(presume, "several", lambda: True)
    made = attending(use_cache=False, attn_implementation="eager")
    model = tunecompile.optimize(made, executor="eager")
    for _ in range(AFTER + 1):
        zoo.step(model, zoo.batch(256, 2, 8))
    assert len(seen) == AFTER + 1
