"""Adapters of an optimized model are saved as PEFT saves them, which is the format that vLLM loads."""

import json
import re

import pytest
import torch

import tunecompile
from tests.models import zoo

pytest.importorskip("peft")
from safetensors.torch import load_file  # noqa: E402


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "nf4"])
def test_saved_as_without_tunecompile(quantized, tmp_path):
    if quantized:
        pytest.importorskip("bitsandbytes")
    model = zoo.adapt(zoo.quantize(zoo.make("llama")) if quantized else zoo.make("llama"), use_rslora=True)
    model.save_pretrained(tmp_path / "plain")
    tunecompile.optimize(model, executor="eager")
    zoo.step(model, zoo.batch())
    model.save_pretrained(tmp_path / "optimized")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "optimized"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "plain" / "adapter_config.json").read_text() == (tmp_path / "optimized" / "adapter_config.json").read_text()


def test_what_vllm_reads(tmp_path):
    """Of adapter_config.json r, lora_alpha, target_modules and use_rslora, and neither DoRA, bias nor saved modules (vllm/lora/peft_helper.py); of tensors
    those that begin with base_model.model and end with lora_A.weight or lora_B.weight, one pair a module."""
    tunecompile.optimize(zoo.adapt(zoo.make("llama"), use_rslora=True), executor="eager").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 4 and config["lora_alpha"] == 8 and config["use_rslora"] is True
    assert config["bias"] == "none" and not config["use_dora"] and not config["modules_to_save"]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    found = {re.fullmatch(r"base_model\.model\.(model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight", name).groups() for name in tensors}
    modules = {module for module, _, _ in found}
    assert {part for _, part, _ in found} == set(config["target_modules"]) and len(modules) == 3 * 7 and len(found) == 2 * len(modules)
    assert all(value.shape[0 if "lora_A" in name else 1] == 4 for name, value in tensors.items())
