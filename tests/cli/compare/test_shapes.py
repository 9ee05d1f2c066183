"""A shape's weights are the same in every process, whether they are built or loaded, and every check of them has eager beside it."""

import pytest
import torch
from safetensors.torch import load_file

import tunecompile
from tests.support import zoo
from tunecompile.cli.compare import models, run
from tunecompile.cli.compare.assemble import parts_of
from tunecompile.cli.compare.shapes import build_shape_model, save_shape_model
from tunecompile.cli.compare.spec import Job, resolve_systems
from tunecompile.estimate.known_shapes import SHAPES, empty_model, lora_targets, shape_config


@pytest.mark.parametrize(
    "name, quantise",
    [("llama-tiny", False), ("mixture-tiny", False)],
)
def test_what_is_saved_is_what_is_built(tmp_path, name, quantise):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    what = dict(seed=3, device="cpu", layers=2, quantise=quantise)
    save_shape_model(name, str(tmp_path), **what)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"}
    ).state_dict()
    built = build_shape_model(name, dtype=torch.bfloat16, **what).state_dict()
    assert set(loaded) == set(built) and all(loaded[name].equal(built[name]) for name in built)
    assert any("quant_map" in name for name in built) == quantise


def test_stacks_of_experts_are_saved_as_they_are(tmp_path):
    """No loader knows them in 4 bits, and it packs them by itself."""
    pytest.importorskip("bitsandbytes")
    save_shape_model("mixture-tiny", str(tmp_path), seed=0, device="cpu", layers=1, quantise=True)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16
    assert saved["model.layers.0.self_attn.q_proj.weight"].dtype == torch.uint8


@pytest.mark.slow
def test_linears_that_are_not_packed_are_loaded_as_they_are(tmp_path, monkeypatch):
    """Gemma 4's gates beside its layers: loaders take every linear of a packed checkpoint for a packed one."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    few = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    few |= dict(head_dim=16, global_head_dim=32, vocab_size=512, vocab_size_per_layer_input=512)
    few |= dict(hidden_size_per_layer_input=64, num_kv_shared_layers=0)
    monkeypatch.setitem(SHAPES, "gemma-4-e4b", SHAPES["gemma-4-e4b"] | few)
    save_shape_model("gemma-4-e4b", str(tmp_path), seed=0, device="cpu", quantise=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"})
    names = {path.rpartition(".")[2] for path, each in loaded.named_modules() if type(each).__name__ == "Linear4bit"}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert "per_layer_input_gate" in {path.rpartition(".")[2] for path, _ in loaded.named_modules()}


@pytest.mark.parametrize("given", ["unsloth,tunecompile", "tunecompile@9.4GiB,unsloth", "tunecompile@auto,tunecompile"])
def test_eager_is_checked_beside_systems_that_are_timed_without_it(tmp_path, given):
    """And without a budget what is timed under one."""
    systems = resolve_systems(given, False)
    job = Job(system="hf", model="llama-tiny", mode="qlora", trainer="loop", shapes=("1x64",), steps=3)
    comparison = run.Comparison(systems, job, tmp_path)
    jobs = run.check_jobs(comparison, systems, str(tmp_path))
    assert [job.system for job in jobs] == ["hf", "tunecompile", run.REFERENCE]


def test_what_does_not_fit_beside_the_others_is_checked_alone(monkeypatch, tmp_path):
    calls = []

    def full_once(self, jobs, at_once=False):
        calls.append((at_once, [job.system for job in jobs]))
        status = {job.system: "oom" if at_once and job.system == "hf" else "ok" for job in jobs}
        return {system: {"runs": [{"status": status[system]}]} for system in status}

    monkeypatch.setattr(run.Runner, "run", full_once)
    job = Job(system="hf", model="llama-tiny", mode="qlora", trainer="loop", shapes=("1x64",), steps=3, device="cuda")
    jobs = [job.replace(system=name) for name in ("hf", "tunecompile", run.REFERENCE)]
    outcome = run.Runner(run.Comparison([], job, tmp_path), {}).run_untimed(jobs)
    assert calls == [(True, ["hf", "tunecompile", run.REFERENCE]), (False, ["hf"])]
    assert [outcome[name]["runs"][0]["status"] for name in ("hf", "tunecompile", run.REFERENCE)] == ["ok"] * 3


@pytest.mark.parametrize("family, stacks", [("qwen3", None), ("qwen3_moe", ["gate_up_proj", "down_proj"])])
def test_adapters_are_put_on_stacks_of_experts_too(family, stacks):
    peft = pytest.importorskip("peft")
    targets = lora_targets(zoo.make(family))
    assert targets.get("target_parameters") == (stacks and [f"experts.{name}" for name in stacks])
    model = peft.get_peft_model(zoo.make(family), peft.LoraConfig(r=2, **targets))
    adapted = {name.split(".mlp.")[1] for name, _ in model.named_parameters() if "lora_A" in name and ".mlp." in name}
    assert len(adapted) == (2 if stacks else 3)


def test_adapters_are_put_on_stacks_in_4_bits():
    pytest.importorskip("bitsandbytes")
    model = zoo.make("qwen3_moe", num_hidden_layers=2, moe_intermediate_size=64)
    names = tunecompile.quantize_experts(model)
    assert lora_targets(model)["target_parameters"] == sorted(names, reverse=True)


def test_experts_are_adapted_or_left_and_kept_in_4_bits():
    pytest.importorskip("bitsandbytes")
    job = Job(system="hf", model="mixture-tiny", mode="qlora", experts=False)
    model = build_shape_model("mixture-tiny", quantise=True, dtype=torch.bfloat16, device="cpu", seed=0, layers=1)
    kept = [p for name, p in model.named_parameters() if "experts" in name and p.is_floating_point()]
    assert not kept and "target_parameters" in lora_targets(model)
    assert "target_parameters" not in lora_targets(model, job.experts)
    assert models.unsloth_targets(model, job) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert "gate_up_proj" in models.unsloth_targets(model, job.replace(experts=True))
    assert parts_of(job.replace(layers=1)) == {"layers": 1, "experts": False}
    assert parts_of(job.replace(model="llama-tiny")) == {}
    assert parts_of(job.replace(model="llama-tiny", rank=8)) == {"rank": 8}


def test_a_mixture_has_its_parameters():
    model = empty_model(shape_config("qwen3-30b-a3b"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(30.53e9, rel=1e-3)
