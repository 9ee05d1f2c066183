"""Masks of whole rows that are presumed, so that no step waits for them, and read behind layers."""

import pytest

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import find
from tests.support.reports import flattened
from tunecompile.runtime.unpad import decision
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
