"""Attention that a model's code writes out: its scores are never made, in padded, packed and full batches."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import find, has
from tests.support.reports import flattened, told_apart
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.unpad import decision
from tunecompile.runtime.unpad.masks import presume
from tunecompile.runtime.unpad.masks.presume import AFTER, SURPRISES
from tunecompile.runtime.unpad.prefixes import search

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, more",
    [
        ("gpt_oss", WINDOWS),
        ("llama", {"attn_implementation": "eager"}),
        ("gemma2", {**WINDOWS, "attn_implementation": "eager", "attn_logit_softcapping": 0.02}),
        ("gptj", {}),  # it returns its weights, and looks up positions in a table
        ("codegen", {}),  # its scores get their factor behind the mask
        ("deepseek_v3", {"attn_implementation": "eager", "first_k_dense_replace": 2}),  # values narrower than queries
    ],
)
def test_padded_packed_and_full(family, more):
    model, reference = pair(lambda: zoo.make(family, num_hidden_layers=2, use_cache=False, **more))
    assert_same_flattened(model, reference, zoo.batch(256, 2, 16))
    assert_same_flattened(model, reference, padded(seed=1))
    assert_same_flattened(model, reference, packed((7, 9), (4, 12)))
    report = tunecompile.report(model)
    apart = family != "gpt_oss"  # whose sequences see each other: it makes its masks without positions
    assert flattened(model) == 1 and told_apart(model) == apart, report
    assert not find(model, "padding-kept", "packing-kept"), report
    (region,) = report.regions
    assert region.providers["varlen_attention: reference"] and not region.recompiles, report


@pytest.mark.slow
def test_a_decoder_that_reads_an_encoder():
    """Its written-out attention to the encoder's tokens has no mask, so rows of documents would see each other's."""
    transformers = pytest.importorskip("transformers")
    small = {"d_model": 32, "max_position_embeddings": 64, "vocab_size": 256, "dropout": 0.0}
    small |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDE.items()}

    def make():
        torch.manual_seed(0)
        config = transformers.BartConfig(**small, attn_implementation="eager")
        return transformers.BartForConditionalGeneration(config).double()

    model, reference = pair(make)
    inputs = zoo.batch(256, 2, 16)
    (loss, ours), (exact, theirs) = zoo.step(model, inputs), zoo.step(reference, inputs)
    assert abs(loss - exact) < 1e-12 and max(zoo.errors(ours, theirs, 1e-6).values()) < 1e-9


def test_a_bias_is_no_mask():
    """What is added to scores and is not a mask alone keeps its batches, and its numbers."""
    model, reference = pair(lambda: attending(attn_implementation="eager"))
    inputs = zoo.batch(256, 2, 12)
    distance = torch.arange(12) - torch.arange(12)[:, None]
    bias = torch.where(distance <= 0, 0.1 * distance, torch.finfo(torch.float32).min).expand(2, 1, 12, 12)
    assert_same_flattened(model, reference, {**inputs, "attention_mask": bias.contiguous()})
    assert has(model, "padding-kept", reason="masks-not-understood"), tunecompile.report(model)


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
