"""What is saved is the model: loaded again without PEFT it gives the same logits, whatever its base and its adapters are made of."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tunecompile
from tests.support import zoo
from tests.support.files import distance, logits
from tests.support.models import images
from tests.support.models.packed import exact
from tunecompile.errors import CannotMerge
from tunecompile.integrations.export.merge import dequantized

pytest.importorskip("peft")


def loaded(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def filled(model):
    """Every adapter says something, also those that begin as zeros, and magnitudes of DoRA."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "trainable_tokens_delta", "modules_to_save")):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def state(model):
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def same(before, after):
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


MLP = ["up_proj", "down_proj"]
OVER_EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
CASES = {
    "lora": ("llama", {}, {}),
    "rank-stabilised": ("llama", {}, {"use_rslora": True, "r": 8}),
    "tied": ("gemma2", {}, {}),
    "dora": ("llama", {}, {"use_dora": True}),
    "head": ("llama", {}, {"target_modules": ["lm_head", *MLP]}),
    "tied head": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["lm_head", *MLP]}),
    "table": ("llama", {}, {"target_modules": ["embed_tokens", *MLP]}),
    "tied table": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens", *MLP]}),
    "saved modules": ("llama", {}, {"modules_to_save": ["lm_head", "input_layernorm"]}),
    "fan in, fan out": ("gpt2", {}, {"fan_in_fan_out": True}),
    "bias": ("qwen2", {}, {"bias": "all"}),
    "adapter's bias": ("qwen2", {}, {"target_modules": ["q_proj"], "lora_bias": True}),
    "tokens": ("llama", {}, {"trainable_token_indices": [*range(99)]}),
    "tied tokens": ("llama", {"tie_word_embeddings": True}, {"trainable_token_indices": [*range(99)]}),
    "experts": (
        "mixtral",
        {},
        {"target_modules": ["q_proj"], **OVER_EXPERTS},
    ),
    "moe": ("qwen3_moe", {}, {}),
    "square experts": ("qwen3_moe", {"moe_intermediate_size": 64}, {"target_modules": ["q_proj"], **OVER_EXPERTS}),
    "transposed experts": ("gpt_oss", {"intermediate_size": 64}, {"target_modules": ["q_proj"], **OVER_EXPERTS}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_gives_the_adapted_ones_logits(case, tmp_path):
    family, config, options = CASES[case]
    model = filled(zoo.adapt(zoo.make(family, **config), **options))
    expected, before = logits(model), state(model)
    tunecompile.save_merged(model, tmp_path, dtype="float32")
    torch.testing.assert_close(logits(loaded(tmp_path)), expected, rtol=1e-5, atol=1e-5)
    assert same(before, state(model)) and torch.equal(logits(model), expected)
    assert (expected - logits(zoo.make(family, **config))).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("adapted", [True, False])
def test_experts_in_4_bits(family, adapted, tmp_path):
    """Square ones: nothing but values would tell a matrix from its transpose."""
    pytest.importorskip("bitsandbytes")
    model = zoo.make(family, num_hidden_layers=2, intermediate_size=64, moe_intermediate_size=64)
    plain = logits(model)
    over = OVER_EXPERTS if adapted else {}
    model = filled(zoo.adapt(model, target_modules=["q_proj"], **over))
    tunecompile.quantize_experts(model)
    # PEFT alone leaves one of the two adapters out (known_bugs.ADAPTED_4_BIT_STACKS)
    expected = logits(tunecompile.optimize(model, executor="eager"))
    tunecompile.save_merged(model, tmp_path, dtype="float32")
    torch.testing.assert_close(logits(loaded(tmp_path)), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(model), expected) and (expected - plain).abs().max() > 1e-3


def test_tied_weights_are_saved_once_unless_they_differ(tmp_path):
    from safetensors import safe_open

    for name, targets, tied in (("one", MLP, True), ("two", ["lm_head"], False)):
        tunecompile.save_merged(
            filled(zoo.adapt(zoo.make("llama", tie_word_embeddings=True), target_modules=targets)), tmp_path / name
        )
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            assert ("lm_head.weight" in file.keys()) != tied
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] == tied


def test_several_adapters(tmp_path):
    """Those that are active, each with its own scale; none while they are disabled."""
    from peft import LoraConfig

    model = zoo.adapt(zoo.make("llama"))
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=16, target_modules=MLP))
    model.add_adapter("third", LoraConfig(r=2, target_modules=MLP))
    filled(model).base_model.set_adapter(["default", "second"])
    expected = logits(model)
    tunecompile.save_merged(model, tmp_path / "both", dtype="float32")
    torch.testing.assert_close(logits(loaded(tmp_path / "both")), expected, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        tunecompile.save_merged(model, tmp_path / "none", dtype="float32")
    torch.testing.assert_close(logits(loaded(tmp_path / "none")), logits(zoo.make("llama")))
    model.merge_adapter()
    tunecompile.save_merged(model, tmp_path / "merged", dtype="float32")
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_share_a_block():
    """On a CPU with AVX512 bitsandbytes gives such rows each other's scales. A last block may have fewer codes."""
    pytest.importorskip("bitsandbytes")
    for rows, columns in ((6, 32), (3, 24)):
        linear = nn.Linear(columns, rows)
        linear.weight.data.copy_(exact(rows, columns))
        expected = linear.weight.clone()
        (made,) = zoo.quantize(nn.Sequential(linear), double=False)
        assert torch.equal(dequantized(made, "it").weight, expected)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "8 bit"])
def test_a_quantised_base_is_not_quantised_again(kind, tmp_path):
    """As training goes, in bf16: nearer than PEFT's merge, and as near as 16 bit can be."""
    bnb = pytest.importorskip("bitsandbytes")
    make = lambda: zoo.make("llama").bfloat16()  # noqa: E731
    base = eight_bit(make()) if kind == "8 bit" else zoo.quantize(make(), torch.bfloat16)
    if kind == "fp4":
        for module in base.modules():
            if isinstance(module, bnb.nn.Linear4bit):
                value = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
                module.weight = bnb.nn.Params4bit(value, requires_grad=False, quant_type="fp4").to("cpu")
    model = zoo.adapt(base)
    reference = in_floats(model)
    before = state(model)
    tunecompile.save_merged(model, tmp_path)
    assert same(before, state(model))
    ours, expected = loaded(tmp_path), logits(reference)
    assert (
        "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
        and loaded(tmp_path, "auto").dtype == torch.bfloat16
    )
    rounded = reference.merge_and_unload().bfloat16().float()
    theirs = in_floats(model.merge_and_unload())
    error = distance(logits(ours), expected)
    assert error < (0.5 if kind == "8 bit" else 0.2) * distance(logits(theirs), expected), (
        error,
        distance(logits(theirs), expected),
    )
    assert error < 1.5 * distance(logits(rounded), expected)


def eight_bit(model):
    import bitsandbytes as bnb

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                linear = bnb.nn.Linear8bitLt(child.in_features, child.out_features, bias=False, has_fp16_weights=False)
                linear.weight = bnb.nn.Int8Params(
                    child.weight.data.clone(), requires_grad=False, has_fp16_weights=False
                )
                setattr(parent, name, linear.to("cpu"))
    model.is_loaded_in_8bit = True
    return model


def in_floats(model):
    """As `zoo.in_fp32`, of 8-bit weights too; PEFT's own layers for quantised bases become its plain ones."""
    import copy

    import bitsandbytes as bnb
    from peft.tuners.lora import Linear

    clone = zoo.in_fp32(model)
    for parent in list(clone.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, bnb.nn.Linear8bitLt):
                linear = nn.Linear(child.in_features, child.out_features, bias=False)
                scale = child.state.SCB if child.weight.SCB is None else child.weight.SCB
                linear.weight = nn.Parameter(
                    child.weight.data.float() * scale.float()[:, None] / 127, requires_grad=False
                )
                setattr(parent, name, linear)
    for module in clone.modules():
        if type(module).__module__ == "peft.tuners.lora.bnb":
            module.__class__ = Linear
    return copy.deepcopy(clone).float()


@pytest.mark.parametrize(
    ("family", "options"), [("gpt2", {}), ("llama", {"use_dora": True}), ("qwen2", {"use_rslora": True, "bias": "all"})]
)
def test_quantised_by_transformers(family, options, tmp_path):
    """As users load it; GPT-2's weights lie the other way round in bitsandbytes' layers."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    zoo.make(family).save_pretrained(tmp_path / "plain")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head"],
    )
    model = zoo.adapt(
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain", dtype=torch.float32, quantization_config=config, device_map="cpu"
        ),
        **options,
    )
    expected = logits(model)
    tunecompile.save_merged(model, tmp_path / "out", dtype="float32")
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), expected, rtol=1e-5, atol=1e-5)


def test_without_adapters(tmp_path):
    """A model that was trained as a whole; a dtype of its own; several files; a tokenizer."""

    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    model = zoo.make("qwen3")
    assert (
        tunecompile.save_merged(model, tmp_path / "a" / "b", torch.float16, Tokenizer(), max_shard_size="100KB")
        == tmp_path / "a" / "b"
    )
    assert (
        len(list((tmp_path / "a" / "b").glob("*.safetensors"))) > 1
        and (tmp_path / "a" / "b" / "tokenizer.json").exists()
    )
    assert loaded(tmp_path / "a" / "b", "auto").dtype == torch.float16
    assert same(state(loaded(tmp_path / "a" / "b").model.layers), state(model.half().float().model.layers))
    assert not any(path.name.startswith(".") for path in (tmp_path / "a" / "b").iterdir())


def adapted(config, base="llama"):
    from peft import get_peft_model

    return get_peft_model(zoo.make(base), config)


def refused():
    """(what is wrong, a model that cannot be merged, what is said of it)."""
    from peft import IA3Config, PromptTuningConfig

    yield (
        "another method",
        lambda: adapted(IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])),
        "only LoRA can be merged",
    )
    yield (
        "a prompt",
        lambda: adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "its adapter is a prompt",
    )
    yield (
        "by token",
        lambda: zoo.adapt(zoo.make("llama"), alora_invocation_tokens=[1, 2]),
        "PEFT does not merge model.layers.0",
    )
    yield "no model", lambda: nn.Linear(2, 2), "no model of transformers"
    yield "offloaded", lambda: zoo.make("llama").to("meta"), "is on no device here"
    yield (
        "changed",
        lambda: changed(zoo.make("llama")),
        "model.layers.1.mlp.up_proj.bias are not what its configuration says",
    )
    yield (
        "too large",
        lambda: too_large(zoo.make("llama")),
        "model.norm.weight has values that are not finite in torch.float16",
    )
    yield "several, one DoRA", lambda: several(zoo.adapt(zoo.make("llama"), use_dora=True)), "activate one"


def changed(model):
    model.model.layers[1].mlp.up_proj.bias = nn.Parameter(torch.zeros(128))
    return model


def too_large(model):
    model.model.norm.weight.data[0] = 1e6
    return model


def several(model):
    from peft import LoraConfig

    model.add_adapter("second", LoraConfig(target_modules=["up_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


@pytest.mark.parametrize(("make", "says"), [pytest.param(make, says, id=case) for case, make, says in refused()])
def test_what_is_refused(make, says, tmp_path):
    with pytest.raises(CannotMerge, match=says):
        tunecompile.save_merged(make(), tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_folders_in_use_and_dtypes(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CannotMerge, match="not empty: give a new folder"):
        tunecompile.save_merged(zoo.make("llama"), tmp_path)
    with pytest.raises(CannotMerge, match="give one of bfloat16"):
        tunecompile.save_merged(zoo.make("llama"), tmp_path / "new", dtype="int8")


@pytest.mark.parametrize("targets, tied", [(["q_proj"], True), (["lm_head"], False)])
def test_a_text_model_inside_another_says_so_where_its_head_is_no_longer_tied(targets, tied, tmp_path):
    """Both configurations: transformers ties by the outer one, and some models by that of their text."""
    model, *_ = images.gemma3()
    config = model.config
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
    model.tie_weights()
    tunecompile.save_merged(filled(zoo.adapt(model, target_modules=targets)), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    told = [each.get("tie_word_embeddings", True) for each in (saved, saved["text_config"])]
    assert told == [tied, tied]
