"""Whose models people train: families of transformers under LoRA, models that read images, and models of a user's own. A cell each (see `cells.py`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn

from tests.support import zoo
from tests.support.batches import padded
from tests.support.matrix.cells import Cell, lora, small
from tests.support.models import hybrids, images, mixtures
from tests.support.models.custom import VOCABULARY, Modern, NanoGPT

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

#: Gemma 4's small ones: the last layers read keys and values of earlier ones
EMBEDDED = {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}

#: as people call it -> the zoo's name, and what else its config needs. (golden.py has what is found in these and in more.)
TEXT: dict[str, tuple[str, dict]] = {
    "Llama 3": ("llama", {"rope_parameters": LLAMA_3}),
    "Llama 4, text": ("llama4", {}),
    "Mistral": ("mistral", {}),
    "Ministral": ("ministral", {}),
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3": ("gemma3", {}),
    "Gemma 4, dense": ("gemma4", {}),
    "Gemma 4, keys as values": ("gemma4", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "Gemma 4, shared keys and an embedding a layer": ("gemma4", EMBEDDED),
    "Phi-3, Phi-4": ("phi3", {}),
    "SmolLM3": ("smollm3", {}),
    "GPT-2": ("gpt2", {}),
    "Phi-4-mini, partial rotary": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
        },
    ),
    "Falcon": ("falcon", {}),
    "Falcon, one key head": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "Falcon, ALiBi": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "alibi": True,
            "bias": True,
            "parallel_attn": False,
        },
    ),
    "Cohere": ("cohere", {}),
    "Cohere 2": ("cohere2", {}),
    "Mixtral": ("mixtral", {}),
    "Qwen3-MoE": ("qwen3_moe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "Qwen3.5": ("qwen3_5", {"layer_types": ["linear_attention", "full_attention"]}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
}
MORE = {
    "Llama 3.2 Vision": images.mllama,
    "Qwen2.5-VL": images.qwen2_5_vl,
    "Qwen3-VL": images.qwen3_vl,
    "Gemma 3, with images": images.gemma3,
    "T5": images.t5,
    "ModernBERT": images.modernbert,
}


def whole_and_padded(make: Callable) -> Callable[[], list[dict]]:
    def batches() -> list[dict]:
        _, inputs = images.adapted(make)
        return [inputs, images.padded(inputs)]

    return batches


def of_remote_code() -> nn.Module:
    """Its code stands beside its weights, and transformers imports it under a name of its own (`trust_remote_code`)."""
    from transformers import AutoModelForCausalLM

    from tests.models import remote

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", f"{folder}/modules"),
    ):
        remote.save(f"{folder}/checkpoint")
        made = AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint", trust_remote_code=True)
    assert type(made).__module__ != remote.__name__
    return made


def of_ones_own(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    return build


def tokens(*names: str) -> Callable[[], list[dict]]:
    """Batches of a model that takes tokens and targets by these names."""
    return lambda: [
        dict.fromkeys(names, zoo.batch(vocabulary=VOCABULARY, seed=seed, length=12 + seed)["input_ids"])
        for seed in range(3)
    ]


def first_loss(model: nn.Module, inputs: dict) -> Tensor:
    return model(**inputs)["loss"]


def second_loss(model: nn.Module, inputs: dict) -> Tensor:
    return model(**inputs)[1]


MIXTURES = {
    "Mixtral": "mixtral",
    "Qwen3-MoE": "qwen3_moe",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5-MoE": "qwen3_5_moe",
    "OLMoE": "olmoe",
    "DeepSeek-V3": "deepseek_v3",
    "GLM-4.5": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "Granite MoE": "granitemoe",
    "Gemma 4 MoE": "gemma4",
}
#: as people call them -> the names of `tests.support.models.hybrids`
HYBRIDS = {
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5-MoE": "qwen3_5_moe",
    "OLMo-hybrid": "olmo_hybrid",
    "Kimi Linear": "kimi_linear",
    "LFM2-MoE": "lfm2_moe",
    "LFM3": "lfm3",
    "Granite 4": "granite_hybrid",
    "Granite 4, with experts": "granite_hybrid_moe",
    "Nemotron-H": "nemotron_h",
    "Falcon-H1": "falcon_h1",
    "Bamba": "bamba",
    "Mamba-2, Codestral Mamba": "mamba2",
    "Zamba2": "zamba2",
    "Zamba": "zamba",
    "Jamba": "jamba",
    "Mamba": "mamba",
    "Falcon-Mamba": "falcon_mamba",
}


def whole_and_padded_rows() -> list[dict]:
    return [zoo.batch(rows=2, length=16), padded(3, 20), padded(3, 24, "left")]


def hybrid(family: str) -> nn.Module:
    return hybrids.adapt(hybrids.make(family, torch.float32, **hybrids.ONE_OF_EACH.get(family, {})))


FAMILIES: dict[str, dict] = {
    **{name: dict(build=lora(family, model=config)) for name, (family, config) in TEXT.items()},
    **{
        f"{name}, a hybrid": dict(build=lambda family=family: hybrid(family), batches=whole_and_padded_rows)
        for name, family in HYBRIDS.items()
    },
    "Qwen3-MoE, all weights": dict(build=lambda: small("qwen3_moe")),
    "Llama 4, text, with experts, all weights": dict(
        build=lambda: small("llama4", moe_layers=[1], num_local_experts=4, num_experts_per_tok=1)
    ),
    **{
        f"{name}, adapters on experts": dict(build=lambda family=family: mixtures.adapted(family))
        for name, family in MIXTURES.items()
    },
    **{
        name: dict(build=lambda make=make: images.adapted(make)[0], batches=whole_and_padded(make))
        for name, make in MORE.items()
    },
    "code from a checkpoint (trust_remote_code)": dict(build=lora(base=lambda _: of_remote_code())),
    "a module of one's own, in Llama's style": dict(
        build=of_ones_own(Modern), batches=tokens("tokens", "labels"), loss=first_loss
    ),
    "a module of one's own, in GPT's style": dict(
        build=of_ones_own(NanoGPT), batches=tokens("idx", "targets"), loss=second_loss
    ),
}
CELLS = [Cell("family", name, **what) for name, what in FAMILIES.items()]
