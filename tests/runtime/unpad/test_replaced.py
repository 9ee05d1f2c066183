"""What users put in the place of a model's own attention, masks, functions and layers is called as it would be without us."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import find, has
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
def test_attention_of_the_users_own_under_sdpa(table):
    stock = table._global_mapping["sdpa"]

    def sharper(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return stock(module, query, key, value, attention_mask, scaling=(scaling or 1.0) * 1.7, **kwargs)

    table.register("sdpa", sharper)
    model, reference = pair(attending)
    plain = zoo.step(copy.deepcopy(reference), padded())[0]
    for seed in range(2):
        assert_same_flattened(model, reference, padded(seed=seed))
    assert flattened(model) == 2 and zoo.step(model, padded())[0] == pytest.approx(plain.item(), rel=1e-5)


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


def both_ways(config, inputs_embeds=None, attention_mask=None, **kwargs):
    """A mask that lets tokens see what comes after them; of the kind that llm2vec puts in."""
    return (attention_mask[:, None, None, :] != 0).expand(-1, 1, inputs_embeds.shape[1], -1)


def nearby(*args, and_mask_function=None, **kwargs):
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(*args, and_mask_function=lambda b, h, q, k: (q - k) < 4, **kwargs)


@pytest.mark.parametrize("function, removed", [pytest.param(both_ways, 0, marks=pytest.mark.slow), (nearby, 0)])
def test_mask_functions_of_the_users_own(function, removed, monkeypatch):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", function)
    model, reference = pair(lambda: attending(use_cache=False))
    for seed in range(2):
        assert_same_flattened(model, reference, padded(seed=seed, side=("right", "left")[seed]))
    assert flattened(model) == removed and has(model, "padding-kept", reason="masks-not-understood")


def test_a_window_that_a_mask_function_adds(monkeypatch):
    """It is one that the layers know: the mask says so, and padding goes."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", nearby)

    def build():
        model = attending(use_cache=False)
        for layer in model.model.layers:
            layer.self_attn.sliding_window = 4
        return model

    model, reference = pair(build)
    assert_same_flattened(model, reference, padded())
    assert flattened(model) == 1


def test_positions_that_a_function_counts_from_a_shape(monkeypatch):
    from transformers.models.llama import modeling_llama

    rotate = modeling_llama.apply_rotary_pos_emb

    def by_shape(q, k, cos, sin, *args, **kwargs):
        places = torch.arange(q.shape[-2], dtype=torch.float32) / 4
        angles = places[:, None] * 10000 ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
        angles = torch.cat([angles, angles], -1)[None]
        return rotate(q, k, angles.cos(), angles.sin())

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", by_shape)
    model, reference = pair(attending)
    assert_same_flattened(model, reference, padded(side="left"))
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


@pytest.mark.slow
def test_layers_that_their_user_compiled():
    def build():
        model = attending(num_hidden_layers=3, use_cache=False)
        for layer in model.model.layers[1:]:
            layer.compile(backend="eager")
        return model

    model, reference = tunecompile.optimize(build(), executor="eager").train(), build().train()
    assert_same_flattened(model, reference, padded())
    assert_same_flattened(model, reference, packed((7, 9)))
    assert told_apart(model) == 1 and has(model, "padding-kept", reason="layer-not-compiled")


class Extremes(nn.Module):
    """As torch's FakeQuantize: by the tensor, and in a module that it takes to be torch's."""

    def forward(self, x):
        scale = x.abs().amax() / 127
        return x + ((x / scale).round() * scale - x).detach()


@pytest.mark.slow
def test_modules_whose_result_is_over_all_tokens(monkeypatch):
    from tunecompile.runtime.unpad import refusals

    monkeypatch.setattr(refusals, "_foreign", lambda module: None)

    def build():
        model = attending(use_cache=False)
        for layer in model.model.layers:
            layer.mlp = nn.Sequential(Extremes(), layer.mlp)
        return model

    model, reference = pair(build)
    assert_same_flattened(model, reference, padded(), limit=1e-3)
    assert_same_flattened(model, reference, packed((7, 9)), limit=1e-3)
    assert not find(model, "padding-removed", "packed-without-mask")
    assert has(model, "padding-kept", reason="mixes-tokens")


@pytest.mark.slow
def test_logits_at_every_position_beside_the_models_own_loss():
    """A first step is a step."""
    teacher = attending().eval()
    model, reference = pair(attending)
    for seed in range(2):
        found = []
        for m in (model, reference):
            out = m.train()(**padded(seed=seed))
            with torch.no_grad():
                target = teacher(**{k: v for k, v in padded(seed=seed).items() if k != "labels"}).logits
            (out.loss + F.kl_div(out.logits.log_softmax(-1), target.softmax(-1), reduction="batchmean")).backward()
            found.append({name: p.grad.clone() for name, p in m.named_parameters()})
            m.zero_grad()
        assert max(zoo.errors(*found).values()) < 1e-4, seed
    assert flattened(model) == 1 and has(model, "padding-kept", reason="logits-read")


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
