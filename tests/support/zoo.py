"""Tiny models of every supported family, their quantised and adapted forms, and one training step to compare them by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

SMALL = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=128,
)


#: family -> how transformers calls it, and what its config needs beside `SMALL`
NAMES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16}),
    "gemma3": ("Gemma3", {"head_dim": 16}),
    # dense; the heads of layers that see all tokens are wider
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "granite": (
        "Granite",
        {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.25},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {}),
    "cohere": ("Cohere", {"pad_token_id": 0}),
    "cohere2": ("Cohere2", {"pad_token_id": 0}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0}),
    "starcoder2": ("Starcoder2", {}),
    "helium": ("Helium", {"head_dim": 16}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "stablelm": ("StableLm", {"pad_token_id": 0}),
    "nemotron": ("Nemotron", {"head_dim": 16}),
    "exaone4": ("Exaone4", {"pad_token_id": 0}),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "ministral": ("Ministral", {"head_dim": 16}),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention"]}),
    "qwen3_5": (
        "Qwen3_5",
        {
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "opt": ("OPT", {"dropout": 0.0, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "pad_token_id": 0,
        },
    ),
    "phi": ("Phi", {"pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "mpt": ("Mpt", {"max_seq_len": 128}),
    "gptj": ("GPTJ", {"rotary_dim": 8, "bos_token_id": 0, "eos_token_id": 1}),
    "codegen": ("CodeGen", {"rotary_dim": 8, "n_ctx": 128, "bos_token_id": 0, "eos_token_id": 1}),
    "gpt_neo": (
        "GPTNeo",
        {
            **{
                "attention_types": [[["global", "local"], 1]],
                "num_layers": 2,
                "num_hidden_layers": 2,
                "window_size": 8,
            },
            **{"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
            **{"bos_token_id": 0, "eos_token_id": 1},
        },
    ),
    "bloom": ("Bloom", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "llama4": (
        "Llama4",
        {"intermediate_size_mlp": 128, "head_dim": 16, "moe_layers": [], "pad_token_id": 0},
    ),  # PEFT cannot adapt its router
}
NAMES["deepseek_v2"] = ("DeepseekV2", NAMES["deepseek_v3"][1])


class Layer(nn.Module):
    """A norm and a linear, and their sum with what they were given."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """Layers of one kind, one after the other, and a scalar of what the last one gives."""

    def __init__(self, layer: type[nn.Module], count: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def make(family: str, **changes) -> nn.Module:
    import transformers as tf

    name, settings = NAMES[family]
    config = getattr(tf, name + ("TextConfig" if family in ("gemma3", "gemma4", "llama4", "qwen3_5") else "Config"))(
        **{**SMALL, **settings, **changes}
    )
    torch.manual_seed(0)
    return getattr(tf, name + "ForCausalLM", getattr(tf, name + "LMHeadModel", None))(config)


def quantize(
    model: nn.Module,
    compute_dtype: torch.dtype = torch.float32,
    double: bool = True,
    storage: torch.dtype = torch.uint8,
    kind: str = "nf4",
) -> nn.Module:
    """Every linear but the head becomes NF4 (or another `kind`), in place; its bytes are kept as `storage`."""
    import bitsandbytes as bnb

    def visit(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                linear = bnb.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    compute_dtype=compute_dtype,
                    quant_type=kind,
                    compress_statistics=double,
                    quant_storage=storage,
                )
                linear.weight = bnb.nn.Params4bit(
                    child.weight.data,
                    requires_grad=False,
                    quant_type=kind,
                    compress_statistics=double,
                    quant_storage=storage,
                )
                if child.bias is not None:
                    linear.bias = nn.Parameter(child.bias.data, requires_grad=False)
                setattr(module, name, linear.to(child.weight.device))
            else:
                visit(child)

    device = next(model.parameters()).device
    visit(model)
    model.is_loaded_in_4bit = True  # as from_pretrained says it: PEFT then takes its own 4-bit layer
    return model.to(device)


def adapt(model: nn.Module, **options) -> nn.Module:
    """LoRA on all linears, with B filled, so that every gradient says something."""
    from peft import LoraConfig, get_peft_model

    settings = dict(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, LoraConfig(**{**settings, **options}))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def batch(vocabulary: int = 256, rows: int = 2, length: int = 16, device: str = "cpu", seed: int = 1) -> dict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary, (rows, length), generator=generator).to(device)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def by_labels(model: nn.Module, inputs: dict) -> torch.Tensor:
    return model(**inputs).loss


def step(
    model: nn.Module,
    inputs: dict,
    autocast: torch.dtype | None = None,
    loss: Callable[[nn.Module, dict], torch.Tensor] = by_labels,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients by name) of one forward and backward."""
    device = next(iter(inputs.values())).device.type
    model.train()
    model.zero_grad(set_to_none=True)
    with torch.autocast(device, autocast) if autocast else contextlib.nullcontext():
        value = loss(model, inputs)
    value.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return value.detach(), gradients


def errors(gradients: dict, reference: dict, floor: float = 0.0) -> dict[str, float]:
    """Relative error of each gradient; norms count as at least `floor` times the largest."""
    assert set(gradients) == set(reference)
    least = max(1e-12, floor * max((g.norm().item() for g in reference.values()), default=0.0))
    return {
        name: ((gradients[name].double() - g.double()).norm() / g.double().norm().clamp_min(least)).item()
        for name, g in reference.items()
    }


def in_fp32(model: nn.Module) -> nn.Module:
    """A copy in fp32; 4-bit weights are replaced by the values they stand for."""
    import copy

    from tunecompile.integrations.bitsandbytes import values_of

    clone = copy.deepcopy(model)
    try:
        import bitsandbytes as bnb
    except ImportError:
        return clone.float()
    for module in list(clone.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, bnb.nn.Linear4bit):
                linear = nn.Linear(
                    child.in_features, child.out_features, bias=child.bias is not None, device=child.weight.device
                )
                weight = values_of(child.weight, child.weight.quant_state).float()
                linear.weight = nn.Parameter(weight, requires_grad=False)
                if child.bias is not None:
                    linear.bias = nn.Parameter(child.bias.data.float(), requires_grad=False)
                setattr(module, name, linear)
    return clone.float()
