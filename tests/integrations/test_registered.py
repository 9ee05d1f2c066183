"""`attn_implementation="tunecompile"` and `experts_implementation="tunecompile"`: eager's numbers, optimized or not."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.compare import assert_close
from tests.support.models.pairs import optimized
from tests.support.notes import find
from tests.support.reports import flattened
from tunecompile.errors import UnknownAttention
from tunecompile.verification.reference_model import twin_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
NAMES = {"attn_implementation": "tunecompile", "experts_implementation": "tunecompile"}
FAMILIES = {
    "llama": {},
    "gpt_oss": WINDOWS,  # sinks, windows, biases of experts
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 0.02},
    "qwen3_moe": {},
    "bloom": {},  # has attention of its own, which adds masks to its scores
}


@pytest.fixture(autouse=True)
def names():
    tunecompile.register()
    tunecompile.register()


def make(family, **more):
    more = {"num_hidden_layers": 2, "use_cache": False, **FAMILIES[family], **more}
    if family != "bloom":
        return zoo.make(family, **more)
    torch.manual_seed(0)
    small = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(**small, attn_implementation=more["attn_implementation"])
    )


def batches():
    return zoo.batch(256, 2, 16), padded(seed=1), padded(seed=1, side="left"), packed((7, 9), (4, 12))


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_eagers(family):
    model = make(family, **NAMES).train()
    reference = make(family, attn_implementation="eager", experts_implementation="eager").train()
    assert model.config._attn_implementation == "tunecompile"
    for inputs in batches():
        assert_close(zoo.step(model, inputs), zoo.step(reference, inputs), floor=1e-4)


def test_optimized():
    """What is found is what would be found of the models' own code."""
    alike = {"layer_types": ["full_attention"] * 2}
    model = optimized(make("gemma2", **NAMES, **alike).train())
    reference = make("gemma2", attn_implementation="eager", experts_implementation="eager", **alike).train()
    assert_close(zoo.step(model, padded(seed=1)), zoo.step(reference, padded(seed=1)), floor=1e-4)
    report = tunecompile.report(model)
    (region,) = report.regions
    assert flattened(model) and not find(model, "padding-kept"), report
    assert region.providers["varlen_attention: reference"], report


@pytest.mark.parametrize("more", [{}, {"s_aux": torch.tensor([0.5, -1.0])}, {"softcap": 0.5}])
def test_queries_that_are_the_last_of_the_keys(more):
    """A model may leave queries out before its last layer."""
    attention = transformers.AttentionInterface()["tunecompile"]
    module = torch.nn.Module()
    query, key, value = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    whole, _ = attention(module, query, key, value, None, **more)
    for last in (1, 3):
        few, _ = attention(module, query[:, :, -last:], key, value, None, **more)
        torch.testing.assert_close(few, whole[:, -last:])
    assert not torch.allclose(attention(module, query, key, value, None, is_causal=False, **more)[0], whole)


def test_what_it_does_not_know_is_refused():
    attention, x = transformers.AttentionInterface()["tunecompile"], torch.randn(1, 2, 4, 8)
    with pytest.raises(UnknownAttention, match="block_indices"):
        attention(torch.nn.Module(), x, x, x, None, block_indices=torch.zeros(1, 4, 2))
    with pytest.raises(UnknownAttention, match="paged cache"):
        attention(torch.nn.Module(), x, x, x, None, softcap=30.0, cache=object())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache):
    model = make("gpt_oss", **NAMES, use_cache=True).eval()
    reference = make("gpt_oss", attn_implementation="eager", experts_implementation="eager", use_cache=True).eval()
    inputs = {"input_ids": zoo.batch(256, 2, 8)["input_ids"], "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    inputs["attention_mask"][1, :3] = 0
    options = dict(max_new_tokens=8, do_sample=False, cache_implementation=cache, eos_token_id=None, pad_token_id=0)
    assert torch.equal(model.generate(**inputs, **options), reference.generate(**inputs, **options))


@pytest.mark.parametrize(("family", "name"), [("gpt_oss", "eager"), ("llama", "sdpa"), ("gemma2", "eager")])
def test_references_of_verify_are_transformers_own(family, name):
    model = make(family, **NAMES)
    twin = twin_of(model, None)
    assert {twin.config._attn_implementation, twin.model.layers[0].self_attn.config._attn_implementation} == {name}
    assert (twin.config._experts_implementation, model.config._attn_implementation) == ("grouped_mm", "tunecompile")
    assert copy.deepcopy(model).config._attn_implementation == "tunecompile"
