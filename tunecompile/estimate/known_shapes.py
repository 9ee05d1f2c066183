"""Configs of well-known models, by the names that `plan` and `compare` accept, and empty models of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from tunecompile.integrations.packed_experts.quantize import stacks
from tunecompile.integrations.packed_experts.stacks import packed_stacks

#: linears of a decoder layer that get adapters: of attention and MLP, of latent attention, of delta rules
TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"),
)
#: stacks of experts' weights that get adapters, where a model has them
STACKS = ("gate_up_proj", "up_proj", "down_proj")
LLAMA3 = dict(
    model_type="llama",
    vocab_size=128256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
)

QWEN3 = dict(
    model_type="qwen3",
    vocab_size=151936,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    head_dim=128,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)

#: the text part alone: one layer of six sees all tokens, with wider heads
GEMMA4 = dict(
    model_type="gemma4_text",
    head_dim=256,
    global_head_dim=512,
    max_position_embeddings=262144,
    final_logit_softcapping=30.0,
)


def _size(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return (
        dict(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=False,
        )
        | more
    )


SHAPES = {
    "llama-3.2-1b": LLAMA3 | _size(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b": LLAMA3 | _size(4096, 14336, 32, 32, 8),
    "llama-3.3-70b": LLAMA3 | _size(8192, 28672, 80, 64, 8),
    "qwen3-14b": QWEN3 | _size(5120, 17408, 40, 40, 8),
    "qwen3-32b": QWEN3 | _size(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": QWEN3
    | _size(
        *(2048, 6144, 48, 32, 4),
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    # transformers' defaults are the widths of these
    "gpt-oss-20b": dict(model_type="gpt_oss", num_hidden_layers=24, num_local_experts=32),
    "glm-4.7-flash": dict(model_type="glm4_moe_lite"),
    # a dense MLP beside the experts
    "gemma-4-26b-a4b": GEMMA4
    | _size(2816, 2112, 30, 16, 8, tie_word_embeddings=True)
    | dict(
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        sliding_window=1024,
        hidden_size_per_layer_input=0,
    ),
    # an embedding for each layer, and the last layers read keys and values of earlier ones
    "gemma-4-e4b": GEMMA4
    | _size(2560, 10240, 42, 8, 2, tie_word_embeddings=True)
    | dict(sliding_window=512, hidden_size_per_layer_input=256, num_kv_shared_layers=18),
    "gemma-4-12b": GEMMA4  # a dense one of that size
    | _size(3840, 15360, 48, 16, 8, tie_word_embeddings=True)
    | dict(sliding_window=1024, hidden_size_per_layer_input=0),
    "qwen3.5-9b": dict(model_type="qwen3_5_text"),
    "qwen3.5-35b-a3b": dict(model_type="qwen3_5_moe_text"),
    "smollm2-135m": LLAMA3 | _size(576, 1536, 30, 9, 3, vocab_size=49152, tie_word_embeddings=True),
    "llama-tiny": LLAMA3 | _size(128, 320, 4, 4, 2, vocab_size=2048, max_position_embeddings=2048),  # for trials
    "mixture-tiny": QWEN3
    | _size(
        *(128, 320, 4, 4, 2),
        model_type="qwen3_moe",
        vocab_size=2048,
        max_position_embeddings=2048,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
}


def shape_config(name: str, layers: int | None = None) -> Any:
    """The transformers config of a shape, with another number of layers if given."""
    from transformers import AutoConfig

    fields = dict(SHAPES[name])
    if layers:
        fields["num_hidden_layers"] = layers
    return AutoConfig.for_model(fields.pop("model_type"), **fields, bos_token_id=0, eos_token_id=1, pad_token_id=2)


def is_mixture(config: Any) -> bool:
    """Whether a config is one of a mixture of experts."""
    fields = config.to_dict()
    return any("experts" in name and fields[name] for name in fields)  # a dense Gemma 4's are None


def lora_targets(model: nn.Module, experts: bool = True) -> dict[str, Any]:
    """What adapters are put on, as arguments of PEFT's `LoraConfig`.

    Those linears of `TARGETS` that it has, or all linears if it has other names; and stacks of experts' weights,
    unless `experts` is False.
    """
    present = {path.rpartition(".")[2] for path, _ in model.named_modules() if ".parametrizations." not in path}
    chosen: dict[str, Any] = {"target_modules": [name for name in TARGETS if name in present] or "all-linear"}
    if not experts:
        return chosen
    found = {
        ".".join(parts[-2:])
        for path, parameter in model.named_parameters()
        if parameter.dim() == 3 and (parts := path.split("."))[-1] in STACKS
    }
    # PEFT knows parametrised ones by their whole names
    found |= {name for name, module, key in stacks(model) if key in packed_stacks(module)}
    return chosen | ({"target_parameters": sorted(found, reverse=True)} if found else {})


def empty_model(config: Any) -> nn.Module:
    """The model of a transformers config on the meta device, with real buffers such as rotary frequencies."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config)
