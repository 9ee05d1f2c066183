"""Granite with windows, whose sinks scale the result of attention: no scores, no padding, and eager's gradients."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.compare import assert_close
from tests.support.notes import find
from tests.support.reports import flattened

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(transformers, "GraniteSWAForCausalLM"), reason="this transformers has it not"),
]
SETTINGS = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "attention_multiplier": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {"GraniteSWA": {}, "GraniteMoeSWA": {"num_local_experts": 4, "num_experts_per_tok": 2}}


def make(kind: str, implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**zoo.SMALL, **SETTINGS, **KINDS[kind]})
    config._attn_implementation = implementation
    model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)  # they begin at zero, where heads are alike
    return model


@pytest.mark.slow  # the sinks have quick tests: tests/passes/test_scaled_by_sinks.py
@pytest.mark.parametrize("implementation", ["eager", "tunecompile"])
@pytest.mark.parametrize("kind", ["GraniteSWA", "GraniteMoeSWA"])
def test_sinks_that_scale(kind, implementation):
    """By the models' own code, and through the attention function that is called by its name."""
    tunecompile.register()
    plain, model = make(kind, "eager"), make(kind, implementation)
    ours = tunecompile.optimize(model, executor="eager")
    for inputs in (padded(seed=1), padded(seed=1, side="left"), packed((7, 9), (4, 12)), zoo.batch(256, 2, 16)):
        got, expected = zoo.step(ours, inputs), zoo.step(plain, inputs)
        assert sum("sinks" in name and bool(gradient.any()) for name, gradient in got[1].items()) == 2
        assert_close(got, expected, floor=1e-4)
    report = tunecompile.report(ours)
    assert not any(m.refused for m in report.matches) and not find(report, "padding-kept"), report
    assert flattened(ours) and report.regions[0].providers["varlen_attention: reference"], report
