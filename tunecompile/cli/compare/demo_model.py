"""A Llama-type GGUF file as a Hugging Face folder, by the packages gguf and tokenizers.

transformers' own GGUF loader gives a model that can be neither trained nor saved, and drops part of this tokenizer.
Reads byte-level BPE vocabularies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunecompile.errors import NotAGguf, need

MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# ChatML with the marks that tell a trainer which tokens are the assistant's; the text is the model's own template.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def read(file: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and tensors of a GGUF file, the tensors in fp32.

    Args:
        file: the GGUF file.
        name: what errors call it.

    Raises:
        NotAGguf: gguf cannot read the file, or dequantise one of its tensors.
        MissingExtra: gguf is not installed.
    """
    need("reading GGUF", "gguf", "gguf")
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {
            tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32))
            for tensor in reader.tensors
        }
    except (ValueError, NotImplementedError) as error:
        raise NotAGguf(path=name, reason=str(error)) from error
    return metadata, tensors


def split_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows, which interleaves the two halves of a head that rotate into each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def state_dict(
    metadata: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors by the names of Hugging Face's Llama."""
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    state = {}
    for name, value in tensors.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if part in heads:
                value = split_rotary(value, heads[part])
            name = f"model.layers.{layer}.{MODULES[part]}.weight"
        elif name in OUTSIDE:
            name = OUTSIDE[name]
        else:
            continue  # rope_freqs and the like, which the config has
        state[name] = value.to(dtype).contiguous()
    return state


def config(metadata: dict, tied: bool, dtype: torch.dtype) -> dict:
    """The fields of config.json."""

    def get(key: str) -> Any:
        return metadata[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": round(get("attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": get("rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def write_tokenizer(metadata: dict, out: Path) -> None:
    """Write tokenizer.json and its config, with the digit split that this vocabulary was trained with."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, fuse_unk=False))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if metadata.get("tokenizer.ggml.pre") == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    special = [token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"]) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    named = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("pad_token", "padding"),
            ("unk_token", "unknown"),
        )
    }
    fields = {name: tokens[i] for name, i in named.items() if i is not None} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML if "<|im_start|>" in tokens else metadata.get("tokenizer.chat_template"),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(fields, indent=1, ensure_ascii=False))


def convert(file: Path, out: Path, name: str = "the file", dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a GGUF file as the Hugging Face folder `out`.

    Args:
        file: the GGUF file.
        out: the folder, which may exist.
        name: what errors call the file.
        dtype: of the weights.

    Raises:
        NotAGguf: the file is no GGUF file of a Llama.
        MissingExtra: gguf is not installed.
    """
    from safetensors.torch import save_file

    metadata, tensors = read(file, name)
    if metadata.get("general.architecture") != "llama":
        raise NotAGguf(path=name, reason=f"the architecture is {metadata.get('general.architecture')!r}")
    out.mkdir(parents=True, exist_ok=True)
    state = state_dict(metadata, tensors, dtype)
    write_tokenizer(metadata, out)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    fields = config(metadata, "lm_head.weight" not in state, dtype)
    (out / "config.json").write_text(json.dumps(fields, indent=1))
    (out / "generation_config.json").write_text(
        json.dumps({key: fields[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    )
