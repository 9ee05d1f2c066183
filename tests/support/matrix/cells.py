"""What people train with: adapters, bases, and what of a model learns. A cell each, for the test and for the support matrix.

Batches, and losses and trainers, stand in files beside this one; `cells()` has all."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import small

DEVICE = os.environ.get("SUPPORT_DEVICE", "cpu")  #: benchmarks/suites/support.py runs them on a GPU, through Inductor
Make = Callable[[], nn.Module]


def three() -> list[dict]:
    return [zoo.batch(seed=seed, rows=2, length=16 + 4 * (seed > 1)) for seed in range(3)]


@dataclass(frozen=True)
class Cell:
    """A way to train. `build` makes a model with the same weights each time, which then takes a step on each batch, or is trained by `run`."""

    section: str
    name: str
    build: Make
    quick: bool = False  #: whether `make test` runs it
    random: bool = False  #: whether its steps draw random numbers: then only the means of many can be compared
    batches: Callable[[], list[dict]] = three
    loss: Callable[[nn.Module, dict], torch.Tensor] = zoo.by_labels
    run: Callable[[Make, Path], tuple[dict[str, float], nn.Module]] | None = (
        None  #: given what makes the model, and a folder: all numbers that are logged, and what was trained
    )
    limit: float | None = None  #: of the relative error, where rounding is coarser than fp32's
    compiles: int | None = None  #: of a region at most, whatever the shapes

    def __str__(self) -> str:
        return f"{self.section}: {self.name}"


def with_peft(
    name: str,
    family: str = "llama",
    base: Callable[[nn.Module], nn.Module] = lambda model: model,
    model: dict | None = None,
    **options: Any,
) -> Callable[[], nn.Module]:
    """A model under the adapter of PEFT's config `name`; what it learns is drawn, so that no gradient is zero."""

    def build() -> nn.Module:
        import peft

        made = peft.get_peft_model(
            base(small(family, **(model or {}))), getattr(peft, name)(task_type="CAUSAL_LM", **options)
        )
        torch.manual_seed(2)
        for path, parameter in made.named_parameters():
            if (
                parameter.requires_grad
                and parameter.dim() > 1
                and "lora_A" not in path
                and "modules_to_save" not in path
            ):
                nn.init.normal_(parameter, std=0.02)
        return made

    return build


def lora(
    family: str = "llama",
    base: Callable[[nn.Module], nn.Module] = lambda model: model,
    model: dict | None = None,
    **options: Any,
) -> Callable[[], nn.Module]:
    return with_peft(
        "LoraConfig", family, base, model, **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    )


def other(name: str, **options: Any) -> Callable[[], nn.Module]:
    return with_peft(name, **{"target_modules": ["q_proj", "v_proj"], **options})


def activated() -> nn.Module:
    """An adapter that is active from the last of certain tokens on: those of one batch of three have it, and in one row only."""
    return lora(
        target_modules=["q_proj", "v_proj"], alora_invocation_tokens=zoo.batch(seed=0)["input_ids"][0, 4:6].tolist()
    )()


def two_adapters(active: list[str]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import peft

        made = lora(target_modules=["q_proj", "v_proj"])()
        torch.manual_seed(3)
        made.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj", "up_proj"], init_lora_weights=False))
        made.base_model.set_adapter(active)
        return made

    return build


def variant(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """LoRA in a form of its own, which an option of that name takes a config for."""

    def build() -> nn.Module:
        import peft

        return lora(target_modules=["q_proj", "v_proj"], **{name: getattr(peft, config)(**options)})()

    return build


def loftq() -> nn.Module:
    """The base is rounded to 4 bits, and the adapter begins as the best of its rank for what that lost."""
    if not torch.cuda.is_available():
        pytest.skip("not here: PEFT computes LoftQ on a GPU")
    return lora(init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 1})()


def eight_bit(model: nn.Module, only: Callable[[int], bool] = lambda index: True) -> nn.Module:
    """Linears of some layers in bitsandbytes' 8 bits."""
    import bitsandbytes as bnb

    for index, layer in enumerate(model.model.layers):
        for path, linear in [(p, m) for p, m in layer.named_modules() if type(m) is nn.Linear] if only(index) else []:
            made = bnb.nn.Linear8bitLt(
                linear.in_features, linear.out_features, bias=linear.bias is not None, has_fp16_weights=False
            )
            made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
            layer.set_submodule(path, made.to(linear.weight.device))
    return model


def four_bit(kind: str = "nf4", double: bool = True) -> Callable[[nn.Module], nn.Module]:
    return lambda model: zoo.quantize(model, double=double, kind=kind)


def by_torchao(config: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    """Linears of the layers whose weights are tensor subclasses of torchao."""

    def base(model: nn.Module) -> nn.Module:
        quantization = pytest.importorskip("torchao.quantization")
        given = {
            name: quantization.PerGroup(value) if name == "granularity" else value for name, value in options.items()
        }
        quantization.quantize_(
            model.model.layers,
            getattr(quantization, config)(**given),
            filter_fn=lambda module, _: type(module) is nn.Linear,
        )
        return model

    return base


LINEARS = [
    f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
]  #: HQQ's classes are none to "all-linear"


def hqq(merged: bool = False, **options: Any) -> Callable[[], nn.Module]:
    """Linears in HQQ's 4 bits. Merged: the adapters were merged and taken out again, which packs the weights anew."""

    def base(model: nn.Module) -> nn.Module:
        quantize = pytest.importorskip("hqq.core.quantize")
        for path, linear in [(p, m) for p, m in model.model.named_modules() if type(m) is nn.Linear]:
            config = quantize.BaseQuantizeConfig(nbits=4, group_size=32)
            weight = linear.weight
            made = quantize.HQQLinear(linear, config, compute_dtype=weight.dtype, device=str(weight.device))
            model.model.set_submodule(path, made)
        return model

    def build() -> nn.Module:
        model = lora(base=base, target_modules=LINEARS, **options)()
        if merged:
            model.merge_adapter()
            model.unmerge_adapter()
        return model

    return build


def four_bit_experts(model: nn.Module) -> nn.Module:
    """On its device before: bitsandbytes does not move the scales of stacks."""
    tunecompile.quantize_experts(model.to(DEVICE))
    return zoo.quantize(model)


def mixed(model: nn.Module) -> nn.Module:
    """The first layer in 8 bits, the second in 4, but for one of its linears."""
    eight_bit(model, lambda index: index == 0)
    kept = model.model.layers[1].mlp.down_proj
    zoo.quantize(model.model.layers[1])
    model.model.layers[1].mlp.down_proj = kept
    return model


def trained(which: Callable[[str], bool], family: str = "llama") -> Callable[[], nn.Module]:
    """Only the parameters of such names learn."""

    def build() -> nn.Module:
        model = small(family)
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(which(path))
        return model

    return build


ADAPTERS = {
    "LoRA": lora(),
    "LoRA, rank-stabilised": lora(use_rslora=True),
    'LoRA with trained biases (bias="all")': lora("qwen2", bias="all"),
    "LoRA with a bias of its own (lora_bias)": lora(lora_bias=True),
    'LoRA with the biases of what it adapts (bias="lora_only")': lora("qwen2", bias="lora_only"),
    "LoRA with dropout": lora(lora_dropout=0.1),
    "ranks and alphas by layer (rank_pattern)": lora(
        rank_pattern={"q_proj": 8, "layers.1.mlp.up_proj": 2}, alpha_pattern={"k_proj": 32}
    ),
    "some layers (layers_to_transform)": lora(target_modules=["q_proj", "v_proj"], layers_to_transform=[1]),
    "modules_to_save": lora(modules_to_save=["embed_tokens", "lm_head"]),
    "LoRA on embeddings": lora(target_modules=["q_proj", "embed_tokens"]),
    "LoRA on the head": lora(target_modules=["q_proj", "lm_head"]),
    "tied embeddings": lora(model={"tie_word_embeddings": True}),
    "tied embeddings, LoRA on the head": lora(
        model={"tie_word_embeddings": True}, target_modules=["q_proj", "lm_head"]
    ),
    "new tokens (trainable_token_indices)": lora(trainable_token_indices=[1, 2, 3]),
    "repeated layers (layer_replication)": lora(
        target_modules=["q_proj", "v_proj"], layer_replication=[[0, 2], [1, 2]]
    ),
    "two adapters, one active": two_adapters(["other"]),
    "two adapters, both active": two_adapters(["default", "other"]),
    "PiSSA": lora(init_lora_weights="pissa"),
    "OLoRA": lora(init_lora_weights="olora"),
    "LoftQ": loftq,
    "aLoRA": activated,
    "LoRA over weights stored [in, out] (GPT-2)": lora("gpt2"),
    "LoRA over transposed weights (Falcon)": lora("falcon"),
    "DoRA": lora(use_dora=True),
    "DoRA over NF4": lora(base=four_bit(), use_dora=True),
    "DoRA with dropout": lora(use_dora=True, lora_dropout=0.1),
    "DoRA over weights stored [in, out] (GPT-2)": lora("gpt2", use_dora=True),
    "experts (target_parameters)": lora(
        "qwen3_moe", target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
    "AdaLoRA": other("AdaLoraConfig", init_r=6, target_r=4, total_step=100),
    "RandLoRA": other("RandLoraConfig", r=8),
    "VeRA": other("VeraConfig", r=8),
    "LoHa": other("LoHaConfig", r=4, alpha=8),
    "LoKr": other("LoKrConfig", r=4, alpha=8),
    "OFT": other("OFTConfig", oft_block_size=8, r=0),
    "BOFT": other("BOFTConfig", boft_block_size=8),
    "HRA": other("HRAConfig", r=4),
    "FourierFT": other("FourierFTConfig", n_frequency=16),
    "MiSS": other("MissConfig", r=8),
    "C3A": other("C3AConfig", block_size=16),
    "SHiRA": other("ShiraConfig", r=4),
    "IA3": with_peft("IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "RoAd": other("RoadConfig", group_size=8),
    "DeLoRA": other("DeloraConfig", r=4),
    "GraLoRA": other("GraloraConfig", r=4),
    "WaveFT": other("WaveFTConfig", n_frequency=16),
    "HiRA": other("HiraConfig", r=4),
    "PSOFT": other("PsoftConfig", r=4),
    "PVeRA, its noise from a generator": other("PveraConfig", r=8, generator_seed=3),
    "VB-LoRA": other("VBLoRAConfig", num_vectors=16, vector_length=8),
    "Uni-LoRA": other("UniLoraConfig", r=4),
    "TinyLoRA": other("TinyLoraConfig", r=2),
    "OSF": other("OSFConfig"),
    "FRoD": other("FrodConfig", progressbar=False),
    "BEFT": other("BeftConfig"),
    "Lily": other("LilyConfig", r=4),
    "GLoRA": other("GloraConfig"),
    "PEANuT": other("PeanutConfig", r=4),
    "DEFT": other("DeftConfig", r=4),
    "AdaMSS": other("AdamssConfig", r=8),
    "KaSA": variant("kasa_config", "KasaConfig"),
    "VeLoRA": variant("velora_config", "VeloraConfig", num_groups=8),
    "MonteCLoRA": variant("monteclora_config", "MontecloraConfig"),
    "QA-LoRA": lora(target_modules=["q_proj", "v_proj"], use_qalora=True, qalora_group_size=8),
    "norms (LNTuning)": with_peft(
        "LNTuningConfig", target_modules=["input_layernorm", "post_attention_layernorm", "norm"]
    ),
    "prompt tuning": with_peft("PromptTuningConfig", num_virtual_tokens=4),
    "P-tuning": with_peft("PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16),
    "prefix tuning": with_peft("PrefixTuningConfig", num_virtual_tokens=4),
}
BASES = {
    "bf16": lambda: lora()().to(torch.bfloat16),
    "fp16": lambda: lora()().to(torch.float16),
    "fp32": lora(),
    "NF4, double quantisation": lora(base=four_bit()),
    "NF4, computed in bf16": lora(base=lambda model: zoo.quantize(model.to(torch.bfloat16), torch.bfloat16)),
    "NF4": lora(base=four_bit(double=False)),
    "FP4, double quantisation": lora(base=four_bit("fp4")),
    "FP4": lora(base=four_bit("fp4", False)),
    "NF4, experts too (quantize_experts)": lora(
        "qwen3_moe", four_bit_experts, {"moe_intermediate_size": 64}, target_modules=["q_proj", "o_proj"]
    ),
    "8 bits (LLM.int8)": lora(base=eight_bit),
    "layers in 8, 4 and 16 bits": lora(base=mixed),
    "torchao, int8 weights": lora(base=by_torchao("Int8WeightOnlyConfig")),
    "torchao, int4 weights": lora(base=by_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=32)),
    "HQQ, 4 bits": hqq(),
    "HQQ, 4 bits, merged and unmerged": hqq(merged=True),
    "HQQ, 4 bits, DoRA, merged and unmerged": hqq(merged=True, use_dora=True),
}
LEARNING = {
    "all weights": trained(lambda path: True),
    "the upper half": trained(lambda path: "layers.0" not in path and "embed" not in path),
    "only norms": trained(lambda path: "norm" in path),
    "only biases": trained(lambda path: "bias" in path, "qwen2"),
    "only the head": trained(lambda path: "lm_head" in path),
    "only embeddings": trained(lambda path: "embed" in path),
}
SIBLINGS = {"lora": (7, 7), "grouped_linear": (5, 5)}
FOUND = {  #: by a cell's name, what its report says of some passes, found and rewritten. No layer is compiled in pieces there
    "LoRA with a bias of its own (lora_bias)": SIBLINGS,
    "DoRA": {"dora": (7, 7), **SIBLINGS},
    "DoRA over NF4": {"dora": (7, 7), "nf4": (7, 7), **SIBLINGS},
    "DoRA with dropout": {"dora": (7, 7), "lora": (7, 0)},
    "DoRA over weights stored [in, out] (GPT-2)": {"dora": (4, 4), "lora": (4, 4)},
}
QUICK = {"only the head"}
RANDOM = {"MonteCLoRA"}  #: draws noise in training, as cells with dropout do
CELLS = [
    Cell(section, name, build, name in QUICK, "dropout" in name or name in RANDOM)
    for section, cells in {"adapter": ADAPTERS, "base": BASES, "what learns": LEARNING}.items()
    for name, build in cells.items()
]


def cells() -> list[Cell]:
    """All, in the order of the table."""
    from tests.support.matrix import batches, families, files, losses, trainers

    return [
        *CELLS,
        *families.CELLS,
        *batches.CELLS,
        *losses.CELLS,
        *trainers.CELLS,
        *files.CELLS,
    ]
