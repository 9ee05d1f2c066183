"""Tiny models with delta rules between layers of attention, and the same with the rule by its definition."""

from __future__ import annotations

import contextlib
import sys

import torch
from torch import nn

from tests.support import zoo
from tests.support.ops.recurrent import recurrence

LINEAR_ATTENTION = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "max_position_embeddings": 512,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: family -> how transformers calls it, and what its config needs
HYBRIDS = {
    "qwen3_5": ("Qwen3_5", LINEAR_ATTENTION),
    "qwen3_next": ("Qwen3Next", {**LINEAR_ATTENTION, **EXPERTS}),
    "olmo_hybrid": (
        "OlmoHybrid",
        {**LINEAR_ATTENTION, "linear_num_key_heads": 4, "pad_token_id": 0, "eos_token_id": 1},
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **TOKENS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,  # as wide as queries: attention without padding takes no other
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm3": ("Lfm3", {**TOKENS, "head_dim": 16, "layer_types": ["conv", "full_attention", "conv"]}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
        },
    ),
    "falcon_h1": ("FalconH1", {**MAMBA, **TOKENS, "mamba_d_ssm": 128, "head_dim": 16}),
    "nemotron_h": (
        "NemotronH",
        {
            **TOKENS,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "head_dim": 16,
            "num_hidden_layers": 4,
        },
    ),
    "mamba2": ("Mamba2", {**TOKENS, "num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16, "chunk_size": 16}),
    "zamba2": (
        "Zamba2",
        {
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "mamba_headdim": 32,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "num_mem_blocks": 1,
            "num_hidden_layers": 4,
            "pad_token_id": 0,
        },
    ),
}


SELECTIVE = {**TOKENS, "state_size": 4, "time_step_rank": 4}
HYBRIDS |= {  # Mamba-1
    "mamba": ("Mamba", SELECTIVE),
    "falcon_mamba": ("FalconMamba", SELECTIVE),
    "jamba": (
        "Jamba",
        {
            **TOKENS,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "num_hidden_layers": 4,
        },
    ),
    "zamba": (
        "Zamba",
        {
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "num_hidden_layers": 4,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "pad_token_id": 0,
        },
    ),
}

HYBRIDS |= {  # with experts
    "qwen3_5_moe": ("Qwen3_5Moe", {**LINEAR_ATTENTION, **EXPERTS}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **TOKENS,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
    "granite_hybrid_moe": (
        "GraniteMoeHybrid",
        {**HYBRIDS["granite_hybrid"][1], "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron_h_moe": (
        "NemotronH",
        {
            **HYBRIDS["nemotron_h"][1],
            "layers_block_type": ["mamba", "attention", "mamba", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
_DELTA = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_CONV = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
#: what leaves families one layer of each kind, or two of the only one
ONE_OF_EACH = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _DELTA),
    "kimi_linear": {**_DELTA, "mlp_layer_types": ["dense", "sparse"]},
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONV),
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    **dict.fromkeys(
        ("granite_hybrid", "granite_hybrid_moe"), {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}
    ),
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"]},
    "nemotron_h_moe": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"]},
    **dict.fromkeys(("falcon_h1", "mamba", "mamba2", "falcon_mamba"), {"num_hidden_layers": 2}),
}
ADAPTED_EXPERTS = ("qwen3_next",)  #: PEFT adapts experts by the names of linears, and refuses dropout there


def is_there(family: str) -> bool:
    """Whether the installed transformers has it."""
    import transformers as tf

    return hasattr(tf, HYBRIDS[family][0] + "ForCausalLM")


def make(family: str, dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    import transformers as tf

    name, settings = HYBRIDS[family]
    config = getattr(tf, name + "TextConfig", None) or getattr(tf, name + "Config")
    torch.manual_seed(0)
    model = getattr(tf, name + "ForCausalLM")(config(**{**zoo.SMALL, **settings, **changes})).to(dtype)
    with torch.no_grad():  # the model's own initial values leave little of a state
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.fill_(-2.0)
    return model.train()


def adapt(model: nn.Module, **options) -> nn.Module:
    """LoRA on the linears that are called: PEFT refuses Mamba's `out_proj`, and its `dt_proj` is read as a weight."""
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    called = sorted(name for name in names - {"out_proj", "dt_proj", "lm_head"} if not name.isdigit())
    return zoo.adapt(model, target_modules=called, **options)


def home_of(model: nn.Module):
    """The file of its classes."""
    return sys.modules[type(model).__module__]


@contextlib.contextmanager
def by_definition(model: nn.Module, monkeypatch):
    """Inside, the model's rule runs token by token, in the dtype of its inputs."""

    def rule(query, key, value, g, beta, **_):
        return recurrence(query, key, value, g, beta, None, None, query.shape[-1] ** -0.5, 1e-6)

    with monkeypatch.context() as patch:
        patch.setattr(home_of(model), "torch_chunk_gated_delta_rule", rule)
        yield
