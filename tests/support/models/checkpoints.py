"""Small checkpoints on the disk whose experts are in MXFP4 or FP8, as gpt-oss and DeepSeek ship them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

import tunecompile
from tests.support import zoo
from tests.support.models.packed import SIZES

BLOCK = 32  #: rows and columns that share a scale of FP8
KINDS = {
    "mxfp4": (
        "gpt_oss",
        {"layer_types": ["full_attention"] * 2},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    ),
    "fp8": (
        "qwen3_moe",
        {"num_key_value_heads": 4},
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"},
    ),
}


def write(folder: Path, kind: str) -> Path:
    """The folder with a model of two layers; kind: a key of `KINDS`, or "fp4": FP8 with experts in MXFP4."""
    family, sizes, config = KINDS["fp8" if kind == "fp4" else kind]
    zoo.make(family, num_hidden_layers=2, **SIZES[family], **sizes).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name in list(weights):
        if kind == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = mxfp4(weights.pop(name).transpose(1, 2))
            weights |= {f"{name}_blocks": blocks.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
        elif kind == "fp4" and ".experts." in name:
            codes, scales = mxfp4(weights[name])
            weights |= {name: codes.view(torch.int8), f"{name}_scale_inv": scales.view(torch.float8_e8m0fnu)}
        elif kind != "mxfp4" and name.endswith("_proj.weight"):
            codes, scales = fp8(weights[name])
            weights |= {name: codes, f"{name}_scale_inv": scales}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return folder


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Random codes of a weight's shape, and scales of about its size."""
    *first, columns = weight.shape
    return (
        torch.randint(256, (*first, columns // 2), dtype=torch.uint8),
        torch.randint(118, 122, (*first, columns // 32), dtype=torch.uint8),
    )


def fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and random scales."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) * 0.01 + 0.001
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def load(folder: Path, kind: str, packed: bool = True):
    """The model with packed experts, or as transformers dequantises it."""
    method = "mxfp4" if kind == "mxfp4" else "fp8"
    theirs = Mxfp4Config if kind == "mxfp4" else FineGrainedFP8Config
    config = tunecompile.packed_config(method) if packed else theirs(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    return model if packed else model.float()  # transformers 5.17 dequantises MXFP4 to bfloat16


def adapted(folder: Path, kind: str):
    """Both, with adapters of equal values over attention and experts."""
    packed, dense = load(folder, kind), load(folder, kind, packed=False)
    names = tunecompile.quantize_experts(packed)
    ends = [f"mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")]
    ours = zoo.adapt(packed.train(), target_modules=["q_proj"], target_parameters=names)
    theirs = zoo.adapt(dense.train(), target_modules=["q_proj"], target_parameters=ends)
    return ours, theirs
