"""Tiny mixtures of experts of many families, in which a token goes to every expert.

Where it went to some, roundings would decide where, and errors of other runs would say little.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.support import zoo
from tests.support.models.packed import PARTS, pair_of

#: what is trained: adapters over experts, all weights, adapters over experts in 4 bits, with linears in 4 bits, too
WAYS = ("lora", "full", "nf4", "qlora")

LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 4}

#: linears around experts that are adapted
ATTENTION = {"q_proj", "o_proj", "q_b_proj", "kv_b_proj", "in_proj_qkvz", "in_proj_qkv", "out_proj"}
#: family -> how transformers calls it, what its config needs, and where its experts are
MIXTURES: dict[str, tuple[str, dict, str]] = {
    "mixtral": ("Mixtral", LOCAL, "mlp.experts"),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}, "mlp.experts"),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16}, "mlp.experts"),
    "qwen3_next": (
        "Qwen3Next",
        {
            **EXPERTS,
            **LINEAR_ATTENTION,
            "head_dim": 16,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
        "mlp.experts",
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**EXPERTS, **LINEAR_ATTENTION, "head_dim": 16, "shared_expert_intermediate_size": 64},
        "mlp.experts",
    ),
    "olmoe": ("Olmoe", {**EXPERTS, "intermediate_size": 64, "pad_token_id": 0, "eos_token_id": 1}, "mlp.experts"),
    "deepseek_v2": ("DeepseekV2", {**ROUTED, **LATENT, "first_k_dense_replace": 0}, "mlp.experts"),
    "deepseek_v3": ("DeepseekV3", {**ROUTED, **LATENT, "first_k_dense_replace": 0}, "mlp.experts"),
    "glm4_moe": (
        "Glm4Moe",
        {**ROUTED, "head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "pad_token_id": 0},
        "mlp.experts",
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**ROUTED, **LATENT, "mlp_layer_types": ["sparse"] * 2, "pad_token_id": 0},
        "mlp.experts",
    ),
    "gpt_oss": ("GptOss", {**LOCAL, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1}, "mlp.experts"),
    "granitemoe": ("GraniteMoe", LOCAL, "block_sparse_moe.experts"),
    "phimoe": ("Phimoe", {"num_local_experts": 2, "num_experts_per_tok": 2, "router_jitter_noise": 0.0}, "mlp.experts"),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 16,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 64,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "experts",
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 4, "moe_intermediate_size": 64, "moe_layer_start_index": 0, "head_dim": 16},
        "mlp.experts",
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": 4, "moe_intermediate_size": 64, "head_dim": 16},
        "mlp.experts",
    ),
    "minimax_m2": ("MiniMaxM2", {**LOCAL, "head_dim": 16, "rotary_dim": 16}, "mlp.experts"),
    "dots1": (
        "Dots1",
        {**ROUTED, "head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1},
        "mlp.experts",
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {**EXPERTS, "num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
        "feed_forward.experts",
    ),
    "jamba": (
        "Jamba",
        {
            **EXPERTS,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "attn_layer_period": 1,
            "attn_layer_offset": 0,
            "pad_token_id": 0,
        },
        "feed_forward.experts",
    ),
}


def make(family: str, **changes) -> nn.Module:
    import transformers as tf

    name, settings, _ = MIXTURES[family]
    config = getattr(tf, name + "TextConfig", None) or getattr(tf, name + "Config")
    torch.manual_seed(0)
    model = getattr(tf, name + "ForCausalLM")(config(**{**zoo.SMALL, "num_hidden_layers": 2, **settings, **changes}))
    with torch.no_grad():  # norms and corrections of scores that say something
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def prepared(model: nn.Module, family: str, way: str) -> tuple[nn.Module, nn.Module]:
    """(A copy of a model, prepared to be trained in a way, the model itself, likewise, with dense experts)."""
    over = [f"{MIXTURES[family][2]}.{part}" for part in PARTS]
    linears = sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} & ATTENTION)
    if way in ("nf4", "qlora"):
        return pair_of(model, over, linears, linears=way == "qlora")
    if way == "lora":
        model = zoo.adapt(model, target_modules=linears, target_parameters=over)
    return copy.deepcopy(model), model


def adapted(family: str) -> nn.Module:
    """Under adapters over experts and attention."""
    return prepared(make(family), family, "lora")[1]
