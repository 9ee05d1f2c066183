"""Models of a known architecture with random weights, built layer by layer on the device.

Weights are drawn for each parameter, seeded by its name, and quantised at once: there is never a full-precision copy of
the whole model, and every process draws the same values. Speed and memory do not depend on the values of weights.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import nn

from tunecompile.estimate.known_shapes import TARGETS, empty_model, shape_config
from tunecompile.integrations.packed_experts.quantize import is_stack, pack


def random_weight(name: str, shape: torch.Size, seed: int, device: str) -> torch.Tensor:
    """Values that are exact in bfloat16, so that models of all precisions have the same weights."""
    if len(shape) == 1:
        make = torch.zeros if name.endswith("bias") else torch.ones
        return make(shape, device=device, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def quantised_linear(linear: nn.Linear, weight: torch.Tensor, dtype: torch.dtype, storage: torch.dtype) -> nn.Module:
    """A bitsandbytes NF4 linear with double quantisation, quantised on the weight's device and stored as `storage`."""
    import bitsandbytes as bnb

    new = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=dtype,
        compress_statistics=True,
        quant_type="nf4",
        quant_storage=storage,
        device="meta",
    )
    new.weight = bnb.nn.Params4bit(
        weight.to(dtype), requires_grad=False, quant_type="nf4", compress_statistics=True, quant_storage=storage
    ).to(weight.device)
    new.quant_state = new.weight.quant_state  # as after loading: a shard of the weight has none
    return new


def places(layers: int, device: str, gpus: int) -> dict[str, str]:
    """A `device_map` with equal shares of layers, the embedding table on the first GPU, norm and head on the last."""
    if gpus == 1 or device == "cpu":
        return {"": device}
    last = f"cuda:{gpus - 1}"
    return {
        "model.embed_tokens": "cuda:0",
        "model.rotary_emb": "cuda:0",
        **{f"model.layers.{layer}": f"cuda:{layer * gpus // layers}" for layer in range(layers)},
        "model.norm": last,
        "lm_head": last,
    }


def build_shape_model(
    name: str,
    *,
    quantise: bool,
    dtype: torch.dtype,
    device: str,
    seed: int,
    layers: int | None = None,
    storage: torch.dtype = torch.uint8,
    gpus: int = 1,
    to_save: bool = False,
) -> nn.Module:
    """A random model of a shape.

    Args:
        name: of the shape.
        quantise: quantise the linears of decoder layers, and their stacks of experts, to NF4.
        dtype: of weights that are not quantised, and of computation.
        device: of the model.
        seed: of the weights.
        layers: number of layers; None: all.
        storage: dtype of the bytes of quantised weights.
        gpus: number of GPUs over which the layers are spread.
        to_save: leave stacks of experts as they are, in host memory: files have no form for them in NF4.
    """
    config = shape_config(name, layers)
    model = empty_model(config)
    where = places(config.num_hidden_layers, device, gpus)
    for path, module in list(model.named_modules()):
        device = next(
            (place for prefix, place in where.items() if f"{path}.".startswith(prefix and f"{prefix}.")), device
        )
        if quantise and isinstance(module, nn.Linear) and path.rpartition(".")[2] in TARGETS:
            parent, _, child = path.rpartition(".")
            weight = random_weight(f"{path}.weight", module.weight.shape, seed, device)
            new = quantised_linear(module, weight, dtype, storage)
            setattr(model.get_submodule(parent), child, new)
            module = new
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                value = random_weight(f"{path}.{key}", parameter.shape, seed, device).to(dtype)
                stack = quantise and is_stack(module, key)
                setattr(module, key, nn.Parameter(value.cpu() if stack and to_save else value))
                if stack and not to_save:
                    pack(module, key, "nf4")
        for key, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[key] = buffer.to(device)
    model.tie_weights()
    if quantise:
        setattr(model, "is_loaded_in_4bit", True)  # noqa: B010 (PEFT reads it to choose its layer class)
    if len(where) > 1:
        from accelerate import dispatch_model

        dispatch_model(model, where)
    return model


def save_shape_model(
    name: str, folder: str, *, seed: int, device: str, layers: int | None = None, quantise: bool = False
) -> None:
    """Save the same weights as a folder of safetensors, for systems that only load from disk.

    Weights are in bfloat16, or with `quantise` the linears of decoder layers in NF4, as bitsandbytes saves them. (In
    bfloat16 a model of 70B parameters exceeds the memory of most machines.)
    """
    how = {"device": device, "seed": seed, "layers": layers}
    model = build_shape_model(name, quantise=quantise, dtype=torch.bfloat16, to_save=True, **how)
    if quantise:
        from transformers import BitsAndBytesConfig

        linears = {path.rpartition(".")[2] for path, each in model.named_modules() if isinstance(each, nn.Linear)}
        model.config.quantization_config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=sorted(linears - {*TARGETS}),  # loaders take all others for packed ones
        )
    model.save_pretrained(folder, save_original_format=False)  # stacks of experts keep their names
    save_tiny_tokenizer(Path(folder))


def save_tiny_tokenizer(folder: Path) -> None:
    """Save a tokenizer of a few hundred entries, since loaders require one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<unk>"]
    tokenizer.train_from_iterator(["a few words"], trainers.BpeTrainer(special_tokens=special, vocab_size=300))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
