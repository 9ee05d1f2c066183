"""Mixtures of experts that have no weights yet are estimated like those that have."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.packed import OVER
from tunecompile.estimate.meta_model import meta_model
from tunecompile.integrations.packed_experts.meta import pack_on_meta
from tunecompile.integrations.packed_experts.quantize import stacks

pytest.importorskip("peft")
SIZES = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "num_experts": 16}


def adapted(packed: bool, meta: bool):
    model = zoo.make("qwen3_moe", **SIZES).to(torch.bfloat16)
    if packed and not meta:
        return zoo.adapt(model, target_modules=["q_proj"], target_parameters=tunecompile.quantize_experts(model))
    if not meta:
        return zoo.adapt(model, target_modules=["q_proj"], target_parameters=OVER)
    with torch.device("meta"):
        model = zoo.adapt(model.to("meta"), target_modules=["q_proj"], target_parameters=OVER)
    for _, module, key in list(stacks(model)) if packed else ():
        pack_on_meta(module, key)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_without_weights(packed):
    if packed:
        pytest.importorskip("bitsandbytes")
    real, hollow = (tunecompile.estimate(adapted(packed, meta), (2, 64), gpu="h100") for meta in (False, True))
    assert hollow.weights == pytest.approx(real.weights, rel=0.02)
    assert hollow.activations == pytest.approx(real.activations, rel=0.01) and hollow.flops == real.flops
    rows = 2 * 64 * 2 * 128 * 2  #: of each token for its two experts, what the first product gives
    assert real.activations > SIZES["num_hidden_layers"] * rows
    dense = zoo.make("qwen3_moe", **SIZES).to(torch.bfloat16)
    stacked = sum(p.nbytes for name, p in dense.named_parameters() if name.endswith(("gate_up_proj", "down_proj")))
    if packed:
        lighter = tunecompile.estimate(adapted(False, True), (2, 64), gpu="h100").weights - hollow.weights
        assert lighter == pytest.approx(stacked * (1 - 0.25 * (1 + 1 / 32)), rel=0.02)


@pytest.mark.slow
def test_a_plan_knows_stacks_in_4_bits():
    model = meta_model("qwen3-30b-a3b", "qlora", 16)
    found = tunecompile.estimate(model, (1, 2048), gpu="h100")
    assert 15 * 2**30 < found.weights < 19 * 2**30
