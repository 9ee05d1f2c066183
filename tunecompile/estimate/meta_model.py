"""A model on the meta device, made from its config and prepared for fine-tuning.

Its 4-bit linears have the sizes of quantised ones: plans are made before weights can be quantised. Codes and scales
have the shapes that bitsandbytes gives them (double quantisation: QLoRA, Dettmers et al., 2023, arXiv:2305.14314), and
the forward is the one that the pass `nf4` makes of bitsandbytes' forward.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.modules import linear
from tunecompile.errors import CannotEstimate, MissingExtra, NoConfig, need, summary
from tunecompile.estimate.denoisers import DENOISERS, TARGETS, denoiser
from tunecompile.estimate.known_shapes import SHAPES, empty_model, lora_targets, shape_config
from tunecompile.integrations.packed_experts.meta import pack_on_meta
from tunecompile.integrations.packed_experts.quantize import refusal, stacks
from tunecompile.ops.nf4 import dequantize_4bit

BLOCK, OUTER = 64, 256  #: number of weights that share a scale, and of scales that share one


class MetaLinear4bit(nn.Module):
    """A frozen 4-bit linear with shapes but no values. It is called on fake tensors."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        quant_type: str = "nf4",
        blocksize: int = BLOCK,
        nested: bool = True,
        device: torch.device | str = "meta",
    ):
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.quant_type, self.blocksize = quant_type, blocksize
        blocks = math.ceil(in_features * out_features / blocksize)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.weight = empty((in_features * out_features // 2, 1), torch.uint8)
        self.absmax = empty((blocks,), torch.uint8 if nested else torch.float32)
        self.code = empty((256,), torch.float32) if nested else None
        self.scale = empty((math.ceil(blocks / OUTER),), torch.float32) if nested else None
        self.offset = empty((), torch.float32) if nested else None
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias in the compute dtype, returned in the dtype of x."""
        weight = _dequantize(
            self.weight,
            self.absmax,
            self.code,
            self.scale,
            self.offset,
            self.out_features,
            self.in_features,
            self.blocksize,
            self.quant_type,
            self.dtype,
        )
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return linear(x.to(self.dtype), weight, bias).to(x.dtype)


_dequantize = dequantize_4bit.overload


def meta_linear(linear: nn.Linear) -> MetaLinear4bit:
    """A 4-bit linear in place of a plain one, quantised as in QLoRA, or of an unquantised one of bitsandbytes."""
    weight = linear.weight
    options = (
        {"quant_type": weight.quant_type, "blocksize": weight.blocksize, "nested": weight.compress_statistics}
        if hasattr(weight, "quant_type")
        else {}
    )
    own = weight.dtype if weight.dtype.is_floating_point else torch.bfloat16
    dtype = getattr(linear, "compute_dtype", None) or own
    return MetaLinear4bit(linear.in_features, linear.out_features, linear.bias, dtype, **options)


def meta_linears(model: nn.Module) -> dict[int, MetaLinear4bit]:
    """Replacements of bitsandbytes' linears that are not quantised yet, by `id` of the linear."""
    return {
        id(module): meta_linear(module)
        for module in model.modules()
        if type(weight := module._parameters.get("weight")).__name__ == "Params4bit" and weight.is_meta
    }


def counted_tensors(model: nn.Module, replacements: dict[int, MetaLinear4bit]) -> list[Tensor]:
    """Parameters and buffers of a model, of replacements where there are any."""
    replaced = {id(module.weight) for module in model.modules() if id(module) in replacements}
    return [
        t
        for holder in (model, *replacements.values())
        for t in (*holder.parameters(), *holder.buffers())
        if id(t) not in replaced
    ]


def find_config(model: str) -> Any:
    """The transformers config of a shape, a folder, a config.json, or a hub id whose config is in the local cache.

    Raises:
        MissingExtra: transformers is not installed.
        NoConfig: there is no config, or transformers cannot read it.
    """
    need("tunecompile plan", "hf", "transformers")
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
    need("a plan for adapters", "hf", "peft")
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
