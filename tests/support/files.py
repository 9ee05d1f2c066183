"""Models that are saved and loaded again, and how far apart their logits are."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.distributed.common import DEVICE, of_docs
from tests.support import zoo
from tunecompile.integrations.bitsandbytes import keep_unpacked


def save_shards(folder) -> None:
    """A checkpoint of several files."""
    zoo.make("llama").save_pretrained(folder, max_shard_size="150KB")


def loaded(told: str, **names):
    """By the lines of the docs that say so. What is told of GPUs is said of the host where there is none."""
    transformers = pytest.importorskip("transformers")
    return of_docs(
        told,
        {
            "torch": torch,
            "dtype": torch.float32,
            "device": DEVICE,
            **{name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "BitsAndBytesConfig")},
            **names,
        },
    )


def logits(model, inputs=None):
    keep_unpacked(model)  # weights that were packed could not be merged, and round scales
    with torch.no_grad():
        return model.eval()(input_ids=(inputs or zoo.batch())["input_ids"]).logits


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def read_as_by_vllm(folder, layers):
    """Of adapter_config.json r, lora_alpha, target_modules and use_rslora, and neither DoRA, bias nor saved modules (vllm/lora/peft_helper.py); of tensors
    those that begin with base_model.model and end with lora_A.weight or lora_B.weight, one pair a module."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (
        config["peft_type"] == "LORA"
        and config["r"] == 4
        and config["lora_alpha"] == 8
        and config["use_rslora"] is True
    )
    assert config["bias"] == "none" and not config["use_dora"] and not config["modules_to_save"]
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {
        re.fullmatch(
            r"base_model\.model\.(model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight", name
        ).groups()
        for name in tensors
    }
    modules = {module for module, _, _ in found}
    assert (
        {part for _, part, _ in found} == set(config["target_modules"])
        and len(modules) == layers * 7
        and len(found) == 2 * len(modules)
    )
    assert all(value.shape[0 if "lora_A" in name else 1] == 4 for name, value in tensors.items())
