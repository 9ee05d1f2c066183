"""A model on the meta device, made from its config and prepared for fine-tuning."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunecompile.errors import CannotEstimate, MissingExtra, NoConfig, summary
from tunecompile.estimate.denoisers import DENOISERS, TARGETS, denoiser
from tunecompile.estimate.known_shapes import SHAPES, empty_model, lora_targets, shape_config
from tunecompile.estimate.meta_nf4 import BLOCK, meta_linear
from tunecompile.integrations.packed_experts.meta import pack_on_meta
from tunecompile.integrations.packed_experts.quantize import refusal, stacks


def find_config(model: str) -> Any:
    """The transformers config of a shape, a folder, a config.json, or a hub id whose config is in the local cache.

    Raises:
        MissingExtra: transformers is not installed.
        NoConfig: there is no config, or transformers cannot read it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtra(what="tunecompile plan", package="transformers", extra="hf")
    from transformers import AutoConfig

    path = Path(model)
    if model in SHAPES and not path.exists():
        return shape_config(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise NoConfig(
            model=model,
            reason="the folder has no config.json",
            mend=f"Put it there, or give the folder that has it. {KNOWN}",
        )
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except Exception as error:  # transformers has no own class for either
        if path.exists():
            raise NoConfig(
                model=model,
                reason=f"transformers cannot read it ({summary(error)})",
                mend="Its model_type has to be one that the installed transformers knows.",
            ) from error
        raise NoConfig(
            model=model,
            reason="there is no such path, and the local cache has no config of that name",
            mend=f"For a model on the hub, fetch its config, a few KB: hf download {model} config.json. {KNOWN}",
        ) from error


KNOWN = f"Shapes that need no file: {', '.join((*SHAPES, *DENOISERS))}."


@functools.lru_cache(maxsize=8)  # the model is only read; plans that do not fit need the other modes of one model
def meta_model(model: str, mode: str, rank: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model on the meta device.

    Args:
        model: as for `find_config`; or one of `DENOISERS`, which takes the tokens of images.
        mode: "qlora", "lora" or "full".
        rank: of the adapters. They are on the seven linears of a Llama's layer, or on all linears of other models.
        dtype: of weights that are not quantised, and of activations.

    Raises:
        CannotEstimate: transformers makes no language model of the config, or PEFT finds nothing to adapt.
        MissingExtra, NoConfig: as `find_config` does.
    """
    config = None if model in DENOISERS else find_config(model)
    try:
        if config is None:
            made, head = denoiser(model, dtype), None
        else:
            made = empty_model(config).to(dtype)
            made.tie_weights()  # emptying has untied them
            made.config.use_cache = False
            head = made.get_output_embeddings()
        if mode == "full":
            return made.requires_grad_(True).train()
        targets = {"target_modules": [*TARGETS]} if config is None else lora_targets(made)
        adapted = _adapted(made, rank, targets, None if config is None else "CAUSAL_LM")
        return (_quantised(adapted, head) if mode == "qlora" else adapted).train()
    except MissingExtra:
        raise
    except Exception as error:
        raise CannotEstimate(model=model, reason=summary(error)) from error


def _adapted(model: nn.Module, rank: int, targets: dict[str, Any], task: str | None) -> nn.Module:
    if importlib.util.find_spec("peft") is None:
        raise MissingExtra(what="a plan for adapters", package="peft", extra="hf")
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=rank, **targets, task_type=task)
    with torch.device("meta"):
        frozen = model.requires_grad_(False)
        return inject_adapter_in_model(config, frozen) if task is None else get_peft_model(frozen, config)


def _quantised(model: nn.Module, head: nn.Module | None) -> nn.Module:
    """The same with linears and stacks of experts in NF4, but for the head and what is trained."""
    for path, module in list(model.named_modules()):
        if (
            type(module) is nn.Linear
            and module is not head
            and not module.weight.requires_grad
            and module.weight.numel() % BLOCK == 0
        ):
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, meta_linear(module))
    for _, module, key in list(stacks(model)):
        if refusal(module, key, BLOCK, loaded=False) is None:
            pack_on_meta(module, key)
    return model
