"""Models that call `flex_attention`: their layers are compiled around it, and batches keep their padding."""

import pytest

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.compare import assert_same_step
from tests.support.models.pairs import pair
from tests.support.notes import fell_back, has

flex = pytest.importorskip("transformers.integrations.flex_attention")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture
def on_cpu(monkeypatch):
    """torch has no backward of it for CPUs, but computes it where nobody asks, written out."""
    import torch.nn.attention.flex_attention as torchs

    monkeypatch.setattr(torchs, "_validate_device", lambda *_, **__: None)
    monkeypatch.setattr(flex.WrappedFlexAttention, "__call__", lambda self: torchs.flex_attention)


def test_flex_attention_stays(on_cpu):
    model, reference = pair(lambda: zoo.make("llama", num_hidden_layers=2, use_cache=False))
    for each in (model, reference):
        each.config._attn_implementation = "flex_attention"
    for inputs in (zoo.batch(256, 2, 16), padded(seed=1), packed((7, 9), (4, 12))):
        assert_same_step(model, reference, inputs)
    report = tunecompile.report(model)
    assert not fell_back(model) and has(model, "padding-kept", reason="other-attention"), report
    assert {m.family for m in report.matches} >= {"rope", "rms_norm", "swiglu"}, report
    counts = []
    for seed in (2, 3):  # other masks are no other graphs
        zoo.step(model, padded(seed=seed))
        counts.append(tunecompile.report(model).regions[0].compiles)
    assert counts[0] == counts[1], tunecompile.report(model)
