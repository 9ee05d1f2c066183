"""Checkpoints whose experts stay in 4 or 8 bits: loaded, trained through, saved, merged; or refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tunecompile
from tests.support import zoo
from tests.support.files import logits
from tests.support.models import checkpoints
from tests.support.models.packed import gradients, named
from tests.support.notes import BROKEN, EAGER, find
from tunecompile.errors import CannotQuantize
from tunecompile.integrations.packed_experts.stacks import packed_stacks
from tunecompile.runtime.model_state import state_of

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
PARTS = ("down_proj", "gate_up_proj")


def experts(model):
    return [module for path, module in model.named_modules() if path.endswith(".experts")]


def pair(folder, kind):
    ours, theirs = checkpoints.adapted(checkpoints.write(folder, kind), kind)
    values = dict(named(ours, dict(ours.named_parameters())))
    with torch.no_grad():
        for name, value in named(theirs, dict(theirs.named_parameters())).items():
            if "lora" in name:
                value.copy_(values[name])
    return ours, theirs


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "fp4"])
def test_stacks_are_loaded_as_they_are(kind, tmp_path):
    folder = checkpoints.write(tmp_path, kind)
    packed, dense = checkpoints.load(folder, kind), checkpoints.load(folder, kind, packed=False)
    for ours, theirs in zip(experts(packed), experts(dense), strict=True):
        assert packed_stacks(ours) == PARTS
        for part in PARTS:
            assert torch.equal(getattr(ours, part), getattr(theirs, part)), part
            assert ours.parametrizations[part].original.dtype == torch.uint8
    assert packed.hf_quantizer.is_trainable
    torch.testing.assert_close(logits(packed), logits(dense), rtol=0, atol=0)
    # what casts a model leaves codes and scales
    for ours, theirs in zip(experts(packed.to(torch.float16)), experts(dense), strict=True):
        assert torch.equal(ours.down_proj, theirs.down_proj)


def test_adapters_are_trained_through_them(tmp_path):
    packed, dense = pair(tmp_path, "mxfp4")
    model = tunecompile.optimize(packed, executor="eager")
    for seed in range(2):  # of few tokens, so that a stack would be the largest that is saved
        few = {"seed": seed, "rows": 1, "length": 8}
        errors = zoo.errors(gradients(model, **few), gradients(dense, **few))
        assert max(errors.values()) < 2e-6, errors
    report = tunecompile.report(model)
    assert not find(report, *EAGER, *BROKEN, "compiled-without-rewrites", "packed-stacks"), report
    op = "dequantize_mxfp4"
    assert f"2 x {op}" in str(report) and "2 x grouped_lora_linear" in str(report)
    contexts = [c for region in state_of(model).regions for b in region.backends.values() for c in b.contexts]
    sizes = [size for context in contexts for _, size in context.saved]
    assert sizes and max(sizes) < 4 * 64 * 64 * 4, "the smaller stack in fp32"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_merged_and_loaded_again_by_transformers_alone(kind, tmp_path):
    packed, dense = pair(tmp_path / "base", kind)
    model = tunecompile.optimize(packed, executor="eager")
    zoo.step(model, zoo.batch())
    tunecompile.save_merged(model, tmp_path / "merged", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert getattr(merged.config, "quantization_config", None) is None
    torch.testing.assert_close(logits(merged), logits(dense), rtol=1e-5, atol=1e-5)


def test_mxfp4_is_saved_as_the_checkpoint_was(tmp_path):
    folder = checkpoints.write(tmp_path / "base", "mxfp4")
    checkpoints.load(folder, "mxfp4").save_pretrained(tmp_path / "again")
    was, is_now = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert was.keys() == is_now.keys() and all(torch.equal(value, is_now[name]) for name, value in was.items())
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_fp8_is_not_saved_as_a_whole(tmp_path):
    with pytest.raises(ValueError, match="not serializable"):
        checkpoints.load(checkpoints.write(tmp_path, "fp8"), "fp8").save_pretrained(tmp_path / "again")


def test_what_is_refused(tmp_path):
    with pytest.raises(CannotQuantize, match="'int3'"):
        tunecompile.packed_config("int3")
    zoo.make("gpt_oss", num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(CannotQuantize, match="nf4_config"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=tunecompile.packed_config())
