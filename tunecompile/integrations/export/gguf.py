"""Convert a model's folder to one GGUF file, which llama.cpp, Ollama and LM Studio load.

llama.cpp's library `gguf` has the names of tensors and the file format. For Llama-type models this module adds what is
in llama.cpp's converter: the order of rotary rows, the scaling of positions, and the kind of tokenizer.
(https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunecompile.errors import CannotWriteGguf, need

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  #: types of tokens
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {  #: steps by which a byte-level tokenizer splits text before it merges -> llama.cpp's name of these steps
    (WORDS % "{1,3}", "bytes"): "llama-bpe",
    (WORDS % "", "bytes"): "qwen2",
    ("digits", "words"): "smollm",
    ("words",): "gpt-2",
}


def save_gguf(folder: str | Path, path: str | Path | None = None) -> Path:
    """Write the output of `save_merged`, or another `transformers` folder of a Llama-type model, as a GGUF file.

    Matrices keep their dtype; vectors are fp32, as in llama.cpp. Its `llama-quantize` makes smaller files of it.

    Args:
        folder: has safetensors, config.json and tokenizer.json of Llama, Mistral, Qwen2, Qwen3, or another model with
            one of their architectures.
        path: the new file. Default: `model.gguf` in the folder.

    Returns:
        The path of the new file.

    Raises:
        CannotWriteGguf: the GGUF form of this model or tokenizer is not known.
        MissingExtra: gguf, transformers or safetensors is not installed.
    """
    need("a GGUF file", "gguf", "gguf", "transformers")
    import gguf
    from transformers import AutoConfig

    folder = Path(folder)
    path = Path(path or folder / "model.gguf")
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        raise CannotWriteGguf(
            path=folder, reason="it has no config.json, or no tokenizer.json (save the tokenizer there, too)"
        )
    config = AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURES.get((config.architectures or ["?"])[0])
    if architecture is None:
        raise _refused(
            folder,
            f"its architecture is {', '.join(config.architectures or ['unknown'])}, "
            f"and not one of {', '.join(ARCHITECTURES)}",
        )
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, architecture)
    try:
        dtype = _write_header(gguf, writer, folder, config)
        _write_tokenizer(gguf, writer, folder, config)
        _write_tensors(gguf, writer, folder, config, architecture, dtype)
        writer.close()
        part.replace(path)
    finally:
        writer.close()
        part.unlink(missing_ok=True)
    return path


def _refused(folder: Path, reason: str) -> CannotWriteGguf:
    return CannotWriteGguf(path=folder, reason=f"{reason}; convert the folder with llama.cpp's convert_hf_to_gguf.py")


def _write_header(gguf: Any, writer: Any, folder: Path, config: Any) -> torch.dtype:
    """Write sizes and the scaling of positions, and return the dtype of matrices."""
    rope, heads = config.rope_parameters, config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "sliding_window", None):
        raise _refused(folder, "it has a sliding window, which these architectures do not have in llama.cpp")
    if (
        rope.get("rope_type", "default") not in ("default", "linear", "llama3")
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        raise _refused(folder, f"it scales positions by {rope.get('rope_type')!r}")
    dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[
        str(config.dtype).removeprefix("torch.")
    ]
    writer.add_name(folder.resolve().name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    return dtype


def _write_tokenizer(gguf: Any, writer: Any, folder: Path, config: Any) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = spec["model"], {token["id"]: token for token in spec.get("added_tokens", ())}
    if model["type"] != "BPE":
        raise _refused(folder, f"its tokenizer is of type {model['type']}")
    tokens = {index: token for token, index in model["vocab"].items()} | {
        index: token["content"] for index, token in added.items()
    }
    size = config.vocab_size
    if max(tokens) >= size:
        raise CannotWriteGguf(
            path=folder,
            reason=f"its tokenizer has {max(tokens) + 1} tokens, and its model {size}; "
            "save the tokenizer it was trained with",
        )
    pieces = bool(model.get("byte_fallback"))
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else _split(folder, spec))
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(size)])
    if pieces:
        ranks = {}
        for rank, merge in enumerate(model["merges"]):
            ranks.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ")), rank)
        writer.add_token_scores(
            [
                -float(ranks.get(tokens.get(index, ""), 0 if index not in tokens else len(ranks)))
                for index in range(size)
            ]
        )
        writer.add_add_space_prefix(
            "▁" in json.dumps([spec.get("normalizer"), spec.get("pre_tokenizer")], ensure_ascii=False)
            and _begins_with_space(spec)
        )
    writer.add_token_types(
        [_kind(tokens.get(index), added.get(index), model.get("unk_token"), pieces) for index in range(size)]
    )
    special = gguf.SpecialVocab(folder, load_merges=not pieces, n_vocab=size)
    special.add_special_token |= _added(folder)
    special.add_to_gguf(writer, quiet=True)


def _added(folder: Path) -> dict[str, bool]:
    """Whether the tokenizer adds BOS and EOS to a text; llama.cpp would otherwise decide by the kind of tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a")["input_ids"]
    return {"bos": ids[0] == tokenizer.bos_token_id, "eos": ids[-1] == tokenizer.eos_token_id}


def _begins_with_space(spec: dict) -> bool:
    """Whether the tokenizer adds a space before a text, as SentencePiece mostly does."""
    normalizer, split = json.dumps(spec.get("normalizer")), spec.get("pre_tokenizer") or {}
    return '"Prepend"' in normalizer or split.get("prepend_scheme") in ("always", "first")


def _kind(token: str | None, added: dict | None, unknown: str | None, pieces: bool) -> int:
    if token is None:
        return UNUSED
    if pieces and token == unknown:
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else USER_DEFINED
    return BYTE if pieces and re.fullmatch("<0x[0-9A-F]{2}>", token) else NORMAL


def _split(folder: Path, spec: dict) -> str:
    """llama.cpp's name for the way in which this tokenizer splits text."""
    split = spec.get("pre_tokenizer") or {}
    steps = []
    for step in split.get("pretokenizers", [split]):
        if step.get("type") == "ByteLevel":
            plain = "words" if step.get("use_regex", True) else "bytes"
            steps.append("other" if step.get("add_prefix_space") else plain)
        elif step.get("type") == "Digits":
            steps.append("digits" if step.get("individual_digits") else "numbers")
        else:
            isolated = step.get("behavior", "Isolated") == "Isolated"
            steps.append(step.get("pattern", {}).get("Regex", step.get("type")) if isolated else "other")
    name = SPLITS.get(tuple(steps))
    # whether words that are tokens are not merged from their parts; llama.cpp decides it by the name
    whole = bool(spec["model"].get("ignore_merges"))
    if name is None or (spec.get("normalizer") or {"type": "NFC"})["type"] != "NFC" or whole != (name == "llama-bpe"):
        raise _refused(folder, "llama.cpp's name for the way in which its tokenizer splits text is not known")
    return name


def _write_tensors(gguf: Any, writer: Any, folder: Path, config: Any, architecture: str, dtype: torch.dtype) -> None:
    """Write all tensors in two passes over the files: the table of all tensors precedes the first tensor."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    stored = {
        torch.float32: gguf.GGMLQuantizationType.F32,
        torch.float16: gguf.GGMLQuantizationType.F16,
        torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    }
    for table in (True, False):
        for name, value in _tensors(folder, config, architecture):
            place = (
                "rope_freqs.weight" if name == "rope_freqs" else names.get_name(name, try_suffixes=(".weight", ".bias"))
            )
            if place is None:
                raise _refused(folder, f"{name} has no place in llama.cpp's {architecture}")
            value = value.to(torch.float32 if value.ndim == 1 else dtype).contiguous()
            data = (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()
            if table:
                writer.add_tensor_info(place, data.shape, data.dtype, data.nbytes, raw_dtype=stored[value.dtype])
            else:
                writer.write_tensor_data(data)
        if table:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()


def _tensors(folder: Path, config: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of all tensors in llama.cpp's order of rows. Its converter calls Llama's rotary rows permuted."""
    from safetensors import safe_open

    if config.rope_parameters.get("rope_type") == "llama3":
        yield "rope_freqs", _rope_factors(config)
    heads = (
        {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if architecture == "llama" else {}
    )
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a file is no dict, and cannot be iterated over)
                value = tensors.get_tensor(name)
                part = name.split(".")[-2]
                yield name, _interleaved(value, heads[part]) if part in heads else value


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Put rows that rotate into each other side by side; in Hugging Face's order they are half a head apart."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _rope_factors(config: Any) -> Tensor:
    """The factor by which Llama 3 divides each frequency."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(len(slowed), device="cpu").float() / len(slowed))
    return plain / slowed
