"""Adapters of an optimized model are saved as PEFT saves them, which is the format that vLLM loads."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tunecompile
from tests.support import zoo
from tests.support.files import logits, read_as_by_vllm
from tunecompile.cli.main import app

PeftModel = pytest.importorskip("peft").PeftModel


def test_saved_as_without_tunecompile(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = zoo.adapt(zoo.quantize(zoo.make("llama")), use_rslora=True)
    model.save_pretrained(tmp_path / "plain")
    tunecompile.optimize(model, executor="eager")
    zoo.step(model, zoo.batch())
    model.save_pretrained(tmp_path / "optimized")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "optimized"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "plain" / "adapter_config.json").read_text() == (
        tmp_path / "optimized" / "adapter_config.json"
    ).read_text()


def test_what_vllm_reads(tmp_path):
    tunecompile.optimize(zoo.adapt(zoo.make("llama"), use_rslora=True), executor="eager").save_pretrained(tmp_path)
    read_as_by_vllm(tmp_path, layers=3)


def merge(*options):
    return CliRunner().invoke(app, ["merge", *map(str, options)])


@pytest.fixture
def trained(tmp_path):
    """A folder with a base, one with its adapter, and the model's logits."""
    zoo.make("llama").save_pretrained(tmp_path / "base")
    model = zoo.adapt(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter", model


def test_merge(trained, tmp_path):
    base, adapter, model = trained
    for name, options in (("named", []), ("given", ["--base", base])):
        result = merge(adapter, tmp_path / name, "--dtype", "float32", *options)
        assert result.exit_code == 0 and str(tmp_path / name) in result.output.replace("\n", ""), result.output
        torch.testing.assert_close(
            logits(AutoModelForCausalLM.from_pretrained(tmp_path / name)), logits(model), rtol=1e-5, atol=1e-5
        )


def test_merge_into_what_it_was_trained_on(trained, tmp_path):
    pytest.importorskip("bitsandbytes")
    base, adapter, _ = trained
    assert merge(adapter, tmp_path / "out", "--dtype", "float32", "--trained-on", "nf4-double").exit_code == 0
    model = zoo.quantize(zoo.make("llama"))
    expected = logits(PeftModel.from_pretrained(model, adapter))
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected, rtol=1e-5, atol=1e-5
    )


def test_merge_into_experts_in_4_bits(tmp_path):
    pytest.importorskip("bitsandbytes")
    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "num_experts_per_tok": 4}
    zoo.make("qwen3_moe", **sizes).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=tunecompile.nf4_config(), dtype=torch.bfloat16
    )
    experts = tunecompile.quantize_experts(loaded)
    model = zoo.adapt(loaded, target_modules=["q_proj"], target_parameters=experts)
    model.save_pretrained(tmp_path / "adapter")
    tunecompile.save_merged(model, tmp_path / "expected", dtype="float32")
    result = merge(tmp_path / "adapter", tmp_path / "out", "--dtype", "float32", "--trained-on", "nf4-experts")
    assert result.exit_code == 0, result.output
    found, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "expected"))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters()))


def test_tokens_that_were_added(trained, tmp_path):
    """The tokenizer beside the adapter is larger than the base's: the table grows as it did before training."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    base, _, _ = trained
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(260)
    model = zoo.adapt(model, modules_to_save=["lm_head", "embed_tokens"])
    model.save_pretrained(tmp_path / "more")
    vocabulary = {f"t{i}": i for i in range(260)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))).save_pretrained(
        tmp_path / "more"
    )
    assert merge(tmp_path / "more", tmp_path / "out", "--dtype", "float32").exit_code == 0
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model), rtol=1e-5, atol=1e-5
    )
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 260


def test_mistakes(trained, tmp_path):
    base, adapter, _ = trained
    for options, says in [
        ((base, tmp_path / "out"), "has no adapter_config.json"),
        ((adapter, base), "give a new folder"),
        ((adapter, tmp_path / "out", "--base", tmp_path / "absent"), "cannot be loaded"),
        ((adapter, tmp_path / "out", "--dtype", "int3"), "'int3' is not one of"),
        ((adapter, tmp_path / "out", "--trained-on", "nf3"), "'nf3' is not one of"),
    ]:
        result = merge(*options)
        assert result.exit_code == 2 and says in " ".join(result.output.split()), result.output
    other = tmp_path / "other"
    zoo.make("llama", hidden_size=32).save_pretrained(other)
    assert "does not fit" in " ".join(merge(adapter, tmp_path / "out", "--base", other).output.split())
