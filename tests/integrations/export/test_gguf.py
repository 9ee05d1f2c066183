"""A GGUF file holds the weights and tokens of the folder it was made of, as llama.cpp orders them: the demo's reader and transformers' get them back."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tunecompile
from tests.support import zoo
from tests.support.files import logits
from tests.support.tokenizers import SPLITS, byte_level, finished
from tunecompile.cli import main
from tunecompile.cli.compare import demo_model as reader
from tunecompile.errors import CannotWriteGguf, MissingExtra
from tunecompile.integrations.export import gguf as writer

gguf = pytest.importorskip("gguf")


def pieces():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "c", "ab", "▁ab", "abc"]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("a", "b"), ("▁", "ab"), ("ab", "c")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return finished(tokenizer)


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA_3}),
    "bias": ("llama", {"attention_bias": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def saved(folder, family="llama", dtype="float32", tokenizer=None, **config):
    torch.manual_seed(5)
    model = zoo.make(family, vocab_size=320, bos_token_id=0, eos_token_id=1, **config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)  # norms and biases that are not all alike
    tunecompile.save_merged(zoo.adapt(model), folder, dtype, tokenizer or byte_level())
    return folder


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_the_same_model(case, tmp_path):
    family, config = CASES[case]
    folder = saved(tmp_path, family, **config)
    assert tunecompile.save_gguf(folder) == folder / "model.gguf"
    inputs = zoo.batch(vocabulary=320, length=48)
    expected = logits(AutoModelForCausalLM.from_pretrained(folder), inputs)
    if case not in (
        "llama 3",
        "linear",
        "bias",
        "qwen3",
    ):  # of which transformers leaves out scaled positions, Llama's biases, and the size of heads
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
        torch.testing.assert_close(logits(read, inputs), expected, rtol=1e-4, atol=1e-5)
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    assert (
        gguf.GGUFReader(folder / "model.gguf").fields["general.architecture"].contents()
        == writer.ARCHITECTURES[architecture]
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_demos_reader_gets_the_weights_back(dtype, tmp_path):
    folder = saved(tmp_path / "out", dtype=dtype)
    path = tunecompile.save_gguf(folder, tmp_path / "m.gguf")
    metadata, tensors = reader.read(path, "")
    state = reader.state_dict(metadata, tensors, torch.float32)
    weights = load_file(folder / "model.safetensors")
    assert state.keys() == weights.keys() and all(
        torch.equal(state[name], value.float()) for name, value in weights.items()
    )
    table = gguf.GGUFReader(path).tensors
    assert all(info.tensor_type == gguf.GGMLQuantizationType.F32 for info in table if len(info.shape) == 1)
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["m.gguf"]
    assert (
        metadata["llama.context_length"] == 128
        and metadata["general.file_type"] == {"float32": 0, "float16": 1, "bfloat16": 32}[dtype]
    )


def test_what_transformers_does_not_read(tmp_path):
    qwen, llama = saved(tmp_path / "qwen", "qwen3"), saved(tmp_path / "llama", attention_bias=True)
    (found, fields), (biases, _) = map(contents, (qwen, llama))
    state = AutoModelForCausalLM.from_pretrained(qwen).state_dict()
    assert fields["qwen3.attention.key_length"].contents() == 16
    for name, place in (
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.down_proj", "ffn_down"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        assert torch.equal(found[f"blk.2.{place}.weight"], state[f"model.layers.2.{name}.weight"])
    bias = AutoModelForCausalLM.from_pretrained(llama).state_dict()["model.layers.1.self_attn.k_proj.bias"]
    assert (
        torch.equal(reader.split_rotary(biases["blk.1.attn_k.bias"][:, None], 2)[:, 0], bias)
        and "blk.1.attn_output.bias" in biases
    )


def contents(folder):
    """Tensors and fields by name."""
    file = gguf.GGUFReader(tunecompile.save_gguf(folder))
    return {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in file.tensors}, file.fields


def test_frequencies_of_llama_3(tmp_path):
    folder = saved(tmp_path, rope_parameters=LLAMA_3)
    factors = contents(folder)[0]["rope_freqs.weight"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = 1e4 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)
    assert factors.max() == 8 and factors.min() == 1


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_tokenizers(split, tmp_path):
    folder = saved(tmp_path, tokenizer=byte_level(split, bos=split == "qwen2"))
    fields = {
        name: field.contents()
        for name, field in gguf.GGUFReader(tunecompile.save_gguf(folder)).fields.items()
        if name.startswith("tokenizer")
    }
    assert (
        fields["tokenizer.ggml.model"] == "gpt2"
        and fields["tokenizer.ggml.pre"] == split
        and fields["tokenizer.ggml.merges"] == ["a b", "ab c"]
    )
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    tool = tokens.index("<tool>")
    assert (
        len(tokens) == 320
        and tokens[:2] == ["<s>", "</s>"]
        and types[:3] == [3, 3, 1]
        and types[tool] == 4
        and set(types[tool + 1 :]) == {5}
    )
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert fields["tokenizer.ggml.add_bos_token"] == (split == "qwen2") and not fields["tokenizer.ggml.add_eos_token"]
    assert fields["tokenizer.chat_template"] == "{{ messages[0]['content'] }}"


def test_pieces(tmp_path):
    """As SentencePiece has them: what is merged first has the higher score."""
    folder = saved(tmp_path, tokenizer=pieces())
    fields = {
        name: field.contents()
        for name, field in gguf.GGUFReader(tunecompile.save_gguf(folder)).fields.items()
        if name.startswith("tokenizer")
    }
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"] is True
    assert (
        types[:4] == [2, 3, 3, 6]
        and scores[tokens.index("ab")]
        > scores[tokens.index("▁ab")]
        > scores[tokens.index("abc")]
        > scores[tokens.index("c")]
    )


def test_what_is_refused(tmp_path):
    mend = "convert_hf_to_gguf.py"
    for number, (options, says) in enumerate(
        [
            ({"family": "gemma2"}, f"Gemma2ForCausalLM.*{mend}"),
            ({"family": "mistral", "sliding_window": 16}, "sliding window"),
            (
                {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
                "scales positions by 'yarn'",
            ),
        ]
    ):
        with pytest.raises(CannotWriteGguf, match=says):
            tunecompile.save_gguf(saved(tmp_path / str(number), **options))
        assert not list((tmp_path / str(number)).glob("*.gguf*"))
    odd = byte_level()
    odd.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(CannotWriteGguf, match=f"splits text.*{mend}"):
        tunecompile.save_gguf(saved(tmp_path / "split", tokenizer=odd))
    (tmp_path / "split" / "tokenizer.json").unlink()
    with pytest.raises(CannotWriteGguf, match="no tokenizer.json"):
        tunecompile.save_gguf(tmp_path / "split")


def test_from_the_command_line(tmp_path, monkeypatch):
    saved(tmp_path / "base")
    model = zoo.adapt(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    result = CliRunner().invoke(main.app, ["merge", str(tmp_path / "adapter"), str(tmp_path / "out"), "--gguf"])
    assert result.exit_code == 0 and (tmp_path / "out" / "model.gguf").exists(), result.output
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(byte_level())
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tunecompile\[gguf\]'"):
        tunecompile.save_gguf(tmp_path / "base")
