"""Models with experts in 4 bits, and the same with dense experts of the same values."""

from __future__ import annotations

import copy
import re

import torch
from torch import Tensor, nn

import tunecompile
from tests.support import zoo
from tunecompile.integrations.bitsandbytes import values_of
from tunecompile.ops.nf4 import CODES

PARTS = ("gate_up_proj", "down_proj")
OVER = [f"mlp.experts.{part}" for part in PARTS]
#: a token goes to every expert: where it goes to some, roundings decide where
SIZES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4},
}


def pair(
    family: str, *, before: bool = True, adapted: bool = True, dtype: torch.dtype = torch.float32, **options
) -> tuple[nn.Module, nn.Module]:
    """(A model with 4-bit experts and adapters, a dense one with the same values).

    Args:
        family: a key of `SIZES`.
        before: whether experts are quantised before they are adapted.
        adapted: whether there are adapters over experts, too.
    """
    dense = zoo.make(family, **{"num_hidden_layers": 2, **SIZES[family], **options}).to(dtype)
    return pair_of(dense, OVER if adapted else None, ["q_proj"], before)


def pair_of(
    dense: nn.Module, over: list[str] | None, modules: list[str], before: bool = True, linears: bool = False
) -> tuple[nn.Module, nn.Module]:
    """(A copy with 4-bit experts and adapters, the model itself, adapted, with the same values).

    Args:
        dense: a model that is not adapted yet.
        over: ends of the names of experts' stacks that are adapted.
        modules: names of linears that are.
        before: whether experts are quantised before they are adapted.
        linears: whether linears are in 4 bits, too; then `before`.
    """
    packed = copy.deepcopy(dense)
    if before:
        names = tunecompile.quantize_experts(packed)
        if linears:
            packed = _linears_in_4bit(packed, dense)
        packed = zoo.adapt(packed, target_modules=modules, target_parameters=names if over else None)
    else:
        packed = zoo.adapt(packed, target_modules=modules, target_parameters=over)
        names = tunecompile.quantize_experts(packed)
    for name in names:
        stack(dense, name).data.copy_(stack(packed.get_base_model(), name))
    dense = zoo.adapt(dense, target_modules=modules, target_parameters=over)
    theirs = dict(named(packed, dict(packed.named_parameters())))
    with torch.no_grad():
        for name, value in named(dense, dict(dense.named_parameters())).items():
            if "lora" in name:
                value.copy_(theirs[name])
    return packed, dense


def _linears_in_4bit(packed: nn.Module, dense: nn.Module) -> nn.Module:
    """The first model with its linears in 4 bits; those of the other one take the values that they stand for."""
    import bitsandbytes as bnb

    packed = zoo.quantize(packed, next(packed.parameters()).dtype)
    for name, module in packed.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            if module.weight.quant_state is None:  # on a CPU, linears are quantised when they are first called
                module(torch.zeros(1, module.in_features))
            dense.get_submodule(name).weight.data.copy_(values_of(module.weight, module.weight.quant_state))
    return packed


def exact(rows: int, columns: int, seed: int = 0) -> Tensor:
    """A weight that NF4 keeps as it is: its levels, times powers of two that differ from block to block."""
    generator, levels = torch.Generator().manual_seed(seed), torch.tensor(CODES["nf4"])
    codes = torch.randint(16, (-(-rows * columns // 64), 64), generator=generator)
    codes[:, 0] = 15  # the level 1: a block's scale is its greatest value
    scales = torch.randint(-6, -1, (len(codes), 1), generator=generator).float().exp2()
    return (levels[codes] * scales).reshape(-1)[: rows * columns].reshape(rows, columns)


def exact_pair(**adapter) -> tuple[nn.Module, nn.Module]:
    """(A model of one layer in NF4 whose rows no block divides, a dense one that never was in 4 bits), same values."""
    dense = zoo.make("llama", num_hidden_layers=1, hidden_size=96, intermediate_size=160)
    for name, module in dense.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            module.weight.data.copy_(exact(*module.weight.shape))
    packed = zoo.adapt(zoo.quantize(copy.deepcopy(dense), double=False), **adapter).train()
    dense = zoo.adapt(dense, **adapter).train()
    trained = dict(dense.named_parameters())
    with torch.no_grad():
        for name, value in packed.named_parameters():
            if value.requires_grad:  # DoRA begins with norms of what it reads
                value.copy_(trained[name])
    return packed, dense


def stack(model: nn.Module, name: str) -> Tensor:
    path, _, part = name.rpartition(".")
    module = model.get_submodule(path)
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return getattr(module, part)


def named(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """By what is adapted: the order in which PEFT's wrappers stand around each other depends on who came first."""
    parts = {path: module.parameter_name for path, module in model.named_modules() if hasattr(module, "parameter_name")}
    found = {}
    for name, value in values.items():
        path = re.sub(r"\.lora_[AB]\..*", "", name)
        plain = name.replace(".base_layer", "")
        found[plain.replace(".lora_", f".{parts[path]}.lora_") if path in parts else plain] = value
    return found


def gradients(model: nn.Module, **options) -> dict[str, Tensor]:
    return named(model, zoo.step(model, zoo.batch(**options))[1])
