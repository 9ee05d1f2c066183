"""What users put in the place of a model's own attention, masks, functions and layers is called as it would be without us."""

import copy

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import has
from tests.support.reports import flattened, told_apart

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def table(monkeypatch):
    """transformers' attention functions; put back behind the test."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "_global_mapping", dict(mapping))
    return type(ALL_ATTENTION_FUNCTIONS)


@pytest.mark.slow
def test_attention_that_is_replaced_between_two_steps(table):
    stock = table._global_mapping["sdpa"]
    model, reference = pair()
    assert_same_flattened(model, reference, padded())
    before = zoo.step(model, padded())[0].item()

    def every_token(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return stock(module, query, key, value, None, scaling=scaling, is_causal=False, **kwargs)

    table.register("sdpa", every_token)
    assert_same_flattened(model, reference, padded())
    assert zoo.step(model, padded())[0].item() != pytest.approx(before, rel=1e-4)
    assert has(model, "padding-kept", reason="mixes-tokens")


def renumbered(model, layers):
    model.model.layers = nn.ModuleList(layers)
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(layers)


@pytest.mark.slow
def test_layers_come_and_go():
    """Copies are not compiled, and see the batch as it is."""
    model, reference = pair(lambda: attending(num_hidden_layers=4, use_cache=False))
    assert_same_flattened(model, reference, padded())
    for m in (model, reference):
        layers = list(m.model.layers)
        renumbered(m, [layers[0], layers[2], copy.deepcopy(layers[2]), layers[3]])
    for batch in (padded(seed=1), packed((7, 9), seed=2), padded(seed=3, side="left")):
        assert_same_flattened(model, reference, batch)
    assert flattened(model) == 1 and told_apart(model) == 1
    assert has(model, "padding-kept", reason="layer-not-compiled")


def qwen_vl():
    config = tf.Qwen2_5_VLTextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    )
    torch.manual_seed(0)
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    return Qwen2_5_VLTextModel(config)


@pytest.mark.parametrize("use_cache", [None, pytest.param(False, marks=pytest.mark.slow)])
def test_positions_in_four_rows(use_cache):
    """Text, time, height and width: of packed rows the model itself says which tokens see each other."""
    made = packed((7, 9))
    positions = made["position_ids"][None].expand(4, -1, -1)
    states = []
    for m in pair(qwen_vl):
        options = {} if use_cache is None else {"use_cache": use_cache}
        hidden = m.train()(input_ids=made["input_ids"], position_ids=positions, **options).last_hidden_state
        hidden.square().mean().backward()
        states.append((hidden.detach(), m.layers[0].self_attn.q_proj.weight.grad.clone()))
    for found, expected in zip(*states):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
