"""Models that read images beside text, an encoder, and an encoder-decoder: every list of layers is compiled, and gradients are eager's."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.images import MODELS, adapted, padded, qwen2_5_vl, qwen3_vl
from tests.support.notes import EAGER, find, has

pytest.importorskip("peft")
tf = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_are_those_of_eager(make):
    model, inputs = adapted(make)
    linears, rotations, layers = MODELS[make]
    expected = [zoo.step(model, each) for each in (inputs, padded(inputs))]
    tunecompile.optimize(model, executor="eager")
    for each, (loss, gradients) in zip((inputs, padded(inputs)), expected):
        again, got = zoo.step(model, each)
        assert again.item() == pytest.approx(loss.item(), rel=1e-5)
        assert all(gradient.any() for gradient in gradients.values())
        worst = max(zoo.errors(got, gradients).items(), key=lambda item: item[1])
        assert worst[1] < 1e-4, worst
    report = tunecompile.report(model)
    found = {m.family: (m.found, m.rewritten) for m in report.matches}
    assert (
        found["linear_cross_entropy"] == (1, 1)
        and found["lora"] == (linears, linears)
        and found["rope"] == (rotations, rotations)
    ), report
    assert [region.layers for region in report.regions] == layers and all(
        region.compiles for region in report.regions
    ), report
    assert not find(report, *EAGER, "weights-outside-layers"), report.notes


def test_what_layers_of_all_models_share_has_as_many_graphs_as_it_may(monkeypatch):
    """transformers wraps each layer's forward in one function, which is compiled by itself where a layer is in pieces.

    A tower is in pieces where attention is a function of the user's, which is called image by image."""
    monkeypatch.setitem(
        tf.AttentionInterface._global_mapping, "mine", lambda *a, **k: tf.AttentionInterface()["sdpa"](*a, **k)
    )
    for make, limit in ((qwen2_5_vl, 8), (qwen3_vl, 1)):
        # (pytest's monkeypatch would delete what a config module keeps outside of its `__dict__`)
        with torch._dynamo.config.patch(recompile_limit=limit):
            model, inputs = adapted(make)
            model.get_base_model().model.visual.config._attn_implementation = "mine"
            (loss, gradients), _ = zoo.step(model, inputs), tunecompile.optimize(model, executor="eager")
            again, got = zoo.step(model, inputs)
            found = (
                find(model, *EAGER),
                has(model, "shared-graph-limit", limit=limit, subject="forward_with_checkpointing"),
            )
        assert again.item() == pytest.approx(loss.item(), rel=1e-5) and max(zoo.errors(got, gradients).values()) < 1e-4
    assert len(found[0]) == 1 and found[1], tunecompile.report(model)
