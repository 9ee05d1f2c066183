"""A tiny GGUF written here becomes a model whose weights and tokens are those that went in."""

import struct

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunecompile.cli.compare import demo_model
from tunecompile.errors import NotAGguf

STRING, ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
F32, Q4_1, Q8_0 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "Q4_1", "Q8_0"))
HIDDEN, HEADS, KV_HEADS, FFN = 64, 4, 2, 64


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    if isinstance(value[0], str):
        return text(key) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))
    return text(key) + struct.pack("<IIQ", ARRAY, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def q4_1(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Bytes and what they decode to."""
    blocks = values.reshape(-1, 32)
    low = blocks.min(1).astype(np.float16)
    scale = ((blocks.max(1) - low) / 15).astype(np.float16)
    q = np.clip(np.round((blocks - low[:, None]) / scale[:, None].astype(np.float32)), 0, 15).astype(np.uint8)
    packed = b"".join(
        s.tobytes() + m.tobytes() + (row[:16] | (row[16:] << 4)).tobytes() for s, m, row in zip(scale, low, q)
    )
    decoded = q.astype(np.float32) * scale.astype(np.float32)[:, None] + low.astype(np.float32)[:, None]
    return packed, decoded.reshape(values.shape)


def q8_0(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    blocks = values.reshape(-1, 32)
    scale = (np.abs(blocks).max(1) / 127).astype(np.float16)
    q = np.clip(np.round(blocks / scale[:, None].astype(np.float32)), -127, 127).astype(np.int8)
    decoded = q.astype(np.float32) * scale.astype(np.float32)[:, None]
    return b"".join(s.tobytes() + row.tobytes() for s, row in zip(scale, q)), decoded.reshape(values.shape)


@pytest.fixture
def tiny():
    """A file's bytes and the tensors in it, by their GGUF names."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab"]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e4,
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    random = np.random.default_rng(0)
    header, body, held = b"", b"", {}
    for name, shape in shapes.items():
        values = random.normal(0, 0.1, shape).astype(np.float32)
        kind = F32 if len(shape) == 1 else Q8_0 if name.startswith("token") else Q4_1
        packed, held[name] = (values.tobytes(), values) if kind == F32 else (q8_0 if kind == Q8_0 else q4_1)(values)
        header += (
            text(name)
            + struct.pack("<I", len(shape))
            + struct.pack(f"<{len(shape)}Q", *shape[::-1])
            + struct.pack("<IQ", kind, len(body))
        )
        body += packed + bytes(-len(packed) % 32)
    head = (
        b"GGUF"
        + struct.pack("<IQQ", 3, len(shapes), len(metadata))
        + b"".join(entry(*item) for item in metadata.items())
        + header
    )
    return head + bytes(-len(head) % 32) + body, held


def test_weights_and_tokenizer_survive(tiny, tmp_path):
    buffer, held = tiny
    (tmp_path / "tiny.gguf").write_bytes(buffer)
    demo_model.convert(tmp_path / "tiny.gguf", tmp_path, dtype=torch.float32)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    state = model.state_dict()
    assert np.array_equal(state["model.layers.0.mlp.up_proj.weight"].numpy(), held["blk.0.ffn_up.weight"])
    assert np.array_equal(state["model.embed_tokens.weight"].numpy(), held["token_embd.weight"])
    # row 1 of a head is the partner of row 0 in the file, and half a head further in Hugging Face's layout
    q, half = state["model.layers.0.self_attn.q_proj.weight"].numpy(), HIDDEN // HEADS // 2
    assert np.array_equal(q[half], held["blk.0.attn_q.weight"][1]) and np.array_equal(
        q[1], held["blk.0.attn_q.weight"][2]
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.decode(tokenizer("ab 12 c")["input_ids"]) == "ab 12 c"
    assert len(tokenizer("12")["input_ids"]) == 2 and len(tokenizer("ab")["input_ids"]) == 1
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False).endswith(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    marked = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert sum(marked["assistant_masks"]) == 2  # the answer and its end


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda b: b"GGML" + b[4:], "GGUF magic invalid"),
        (lambda b: b[:4] + struct.pack("<I", 9) + b[8:], "version 9"),
        (
            lambda b: b.replace(
                text("general.architecture") + struct.pack("<I", 8) + text("llama"),
                text("general.architecture") + struct.pack("<I", 8) + text("mamba"),
            ),
            "'mamba'",
        ),
    ],
)
def test_other_files_are_refused(tiny, tmp_path, damage, says):
    (tmp_path / "tiny.gguf").write_bytes(damage(tiny[0]))
    with pytest.raises(NotAGguf, match=says):
        demo_model.convert(tmp_path / "tiny.gguf", tmp_path)
