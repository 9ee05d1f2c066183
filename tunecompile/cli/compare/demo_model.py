"""A Llama-type GGUF file -> a Hugging Face folder, with numpy, torch and tokenizers alone.

transformers' own GGUF loader gives a model that can be neither trained nor saved, and drops part of this tokenizer.
Reads F32, F16, BF16, Q8_0, Q4_0 and Q4_1 tensors and byte-level BPE vocabularies.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tunecompile.cli.compare.errors import NotAGguf

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCK = 32  # elements in a quantised block
F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30

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

# ChatML with the marks that tell a trainer which tokens are the assistant's; the text is that of the model's own template.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # rows first, as torch has it; the file has it the other way round
    kind: int
    offset: int


class Reader:
    """Walks over the header of a GGUF file held in memory."""

    def __init__(self, buffer: memoryview, path: str):
        self.buffer, self.path, self.place = buffer, path, 0

    def take(self, form: str):
        value = struct.unpack_from("<" + form, self.buffer, self.place)[0]
        self.place += struct.calcsize("<" + form)
        return value

    def string(self) -> str:
        length = self.take("Q")
        self.place += length
        return bytes(self.buffer[self.place - length : self.place]).decode("utf-8", "replace")

    def value(self, kind: int):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.take("I"), self.take("Q")
            if element in SCALARS:  # at once: vocabularies have tens of thousands of entries
                form = f"<{count}{SCALARS[element]}"
                self.place += struct.calcsize(form)
                return list(struct.unpack_from(form, self.buffer, self.place - struct.calcsize(form)))
            return [self.value(element) for _ in range(count)]
        return self.take(SCALARS[kind])

    def header(self) -> tuple[dict, list[TensorInfo], int]:
        """Metadata, the tensors' table, and where their data begin."""
        if bytes(self.buffer[:4]) != b"GGUF":
            raise NotAGguf(path=self.path, reason="the file does not begin with GGUF")
        self.place = 4
        version = self.take("I")
        if version not in (2, 3):
            raise NotAGguf(path=self.path, reason=f"version {version} is unknown")
        tensors, entries = self.take("Q"), self.take("Q")
        metadata = {}
        for _ in range(entries):
            key = self.string()
            metadata[key] = self.value(self.take("I"))
        table = []
        for _ in range(tensors):
            name = self.string()
            shape = tuple(self.take("Q") for _ in range(self.take("I")))[::-1]
            table.append(TensorInfo(name, shape, self.take("I"), self.take("Q")))
        alignment = metadata.get("general.alignment", 32)
        return metadata, table, -(-self.place // alignment) * alignment


def decode(buffer: memoryview, start: int, info: TensorInfo, path: str) -> torch.Tensor:
    """One tensor in fp32."""
    count, at = math.prod(info.shape), start + info.offset
    blocks = count // BLOCK
    if info.kind in (F32, F16):
        values = np.frombuffer(buffer, "<f4" if info.kind == F32 else "<f2", count, at).astype(np.float32)
    elif info.kind == BF16:
        values = (np.frombuffer(buffer, "<u2", count, at).astype(np.uint32) << 16).view(np.float32)
    elif info.kind == Q8_0:
        block = np.frombuffer(buffer, np.dtype([("scale", "<f2"), ("q", "i1", BLOCK)]), blocks, at)
        values = block["q"].astype(np.float32) * block["scale"].astype(np.float32)[:, None]
    elif info.kind in (Q4_0, Q4_1):
        fields = [("scale", "<f2"), *([("low", "<f2")] if info.kind == Q4_1 else []), ("q", "u1", BLOCK // 2)]
        block = np.frombuffer(buffer, np.dtype(fields), blocks, at)
        q = np.concatenate([block["q"] & 15, block["q"] >> 4], 1).astype(np.float32)  # low nibbles are the first half
        scale = block["scale"].astype(np.float32)[:, None]
        values = q * scale + block["low"].astype(np.float32)[:, None] if info.kind == Q4_1 else (q - 8) * scale
    else:
        raise NotAGguf(path=path, reason=f"tensor {info.name} has type {info.kind}")
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(info.shape)


def split_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two halves that rotate into each other; Hugging Face keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def state_dict(metadata: dict, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
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
            continue  # rope_freqs and the like, which the config says
        state[name] = value.to(dtype).contiguous()
    return state


def config(metadata: dict, tied: bool, dtype: torch.dtype) -> dict:
    get = lambda key: metadata[f"llama.{key}"]  # noqa: E731
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
    """tokenizer.json and its config, with the digit split that this vocabulary was made with."""
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


def convert(buffer: bytes, out: Path, path: str = "the file", dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the Hugging Face folder `out` from the bytes of a GGUF file."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    view = memoryview(buffer)
    metadata, table, start = Reader(view, path).header()
    if metadata.get("general.architecture") != "llama":
        raise NotAGguf(path=path, reason=f"the architecture is {metadata.get('general.architecture')!r}")
    state = state_dict(metadata, {info.name: decode(view, start, info, path) for info in table}, dtype)
    write_tokenizer(metadata, out)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    fields = config(metadata, "lm_head.weight" not in state, dtype)
    (out / "config.json").write_text(json.dumps(fields, indent=1))
    (out / "generation_config.json").write_text(
        json.dumps({key: fields[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    )
