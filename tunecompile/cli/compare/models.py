"""Load the model, quantise it, add an adapter, and apply one of the systems."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from tunecompile.cli.compare.data import prepare_tokenizer
from tunecompile.cli.compare.shapes import build_shape_model
from tunecompile.cli.compare.spec import REFERENCE, Job
from tunecompile.errors import ModelNotFound, NotOptimized
from tunecompile.estimate.known_shapes import SHAPES, lora_targets
from tunecompile.integrations.bitsandbytes import values_of
from tunecompile.runtime.layers.find_layers import find_layers
from tunecompile.verification.reference_model import Float64, widen_stacks


def check_model(model: str) -> None:
    """Raise `ModelNotFound` for a wrong name, before anything is started."""

    def missing(reason: str) -> ModelNotFound:
        return ModelNotFound(model=model, reason=reason, shapes=", ".join(SHAPES))

    folder = Path(model)
    if model in SHAPES:
        return
    if folder.exists():
        if not (folder / "config.json").is_file():
            reason = "the path exists but has no config.json" if folder.is_dir() else "that is a file, not a folder"
            raise missing(reason)
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise missing("no such folder")


def is_shape(model: str) -> bool:
    """Whether the name is one of a shape model."""
    return model in SHAPES and not Path(model).exists()


def load_tokenizer(job: Job) -> Any:
    """The tokenizer with its own padding token, or None for a shape model."""
    if is_shape(job.model):
        return None
    from transformers import AutoTokenizer

    return prepare_tokenizer(AutoTokenizer.from_pretrained(job.model))


def load_base(job: Job) -> nn.Module:
    """The base model on the device; for qlora in NF4 with double quantisation."""
    dtype = getattr(torch, job.dtype)
    shards = job.processes > 1 and job.parallel in ("fsdp2", "zero3")  # which shard floats only
    storage = dtype if shards else torch.uint8
    if is_shape(job.model):
        how = {"quantise": job.mode == "qlora", "dtype": dtype, "device": job.device, "storage": storage}
        gpus = job.gpus if job.placed else 1
        return build_shape_model(job.model, **how, gpus=gpus, seed=job.seed, layers=job.layers)
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantisation = None
    if job.mode == "qlora":
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=storage,
        )
    how = {"quantization_config": quantisation, "dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(job.model, **how, **placement(job))


def placement(job: Job) -> dict:
    """Arguments of loading for the device: this process's, or all GPUs with balanced layers."""
    if job.placed and job.device == "cuda":
        free = {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(job.gpus)}
        return {"device_map": "balanced", "max_memory": free}
    return {"device_map": {"": torch.cuda.current_device() if job.device == "cuda" else job.device}}


def add_adapter(model: nn.Module, job: Job) -> nn.Module:
    """Add LoRA to what `tunecompile.estimate.known_shapes.lora_targets` says."""
    if job.mode == "full":
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    targets = lora_targets(model, job.experts)
    return get_peft_model(
        model, LoraConfig(r=job.rank, lora_alpha=job.alpha, lora_dropout=0.0, **targets, task_type="CAUSAL_LM")
    )


def load_unsloth(job: Job) -> nn.Module:
    """Load, quantise and adapt with Unsloth's functions. The process has to import unsloth first."""
    from unsloth import FastLanguageModel

    checkpointing = "unsloth" if job.checkpoints else False
    model, _ = FastLanguageModel.from_pretrained(
        job.model,
        max_seq_length=max(job.seq_len, 32768),
        load_in_4bit=job.mode == "qlora",
        dtype=getattr(torch, job.dtype),
        full_finetuning=job.mode == "full",
        use_gradient_checkpointing=checkpointing,
    )
    if job.mode == "full":
        return model
    return FastLanguageModel.get_peft_model(
        model,
        r=job.rank,
        lora_alpha=job.alpha,
        lora_dropout=0,
        target_modules=unsloth_targets(model, job),
        use_gradient_checkpointing=checkpointing,
    )


def unsloth_targets(model: nn.Module, job: Job) -> list[str]:
    """The names of `lora_targets` as Unsloth has them: stacks of experts' weights are linears there."""
    targets = lora_targets(model, job.experts)
    stacked = ["gate_proj", "up_proj", "down_proj", "gate_up_proj"] if "target_parameters" in targets else []
    return list(dict.fromkeys([*targets["target_modules"], *stacked]))


def load_model(job: Job) -> nn.Module:
    """The model with its adapter, before the system is applied."""
    if job.engine == "unsloth":
        model = load_unsloth(job)
    else:
        model = load_base(job)
        if job.engine == REFERENCE:
            model = to_reference(model, reference_dtype(job))
        model = add_adapter(model, job)
        if job.engine == REFERENCE:
            model = model.to(reference_dtype(job))
            widen_stacks(model, reference_dtype(job))  # behind PEFT's wrappers, which it looks through
        model.config.use_cache = False
    set_initial_adapter(model, job.draw)
    return model


def apply_system(model: nn.Module, job: Job) -> nn.Module:
    """Apply the system, in which alone the runs differ."""
    engine = job.engine
    if engine == "compile":
        model.compile()
    elif engine == "compile-layers":
        for layer in (layer for stack in find_layers(model) for layer in stack.members):
            layer.forward = torch.compile(layer.forward)  # inside of hooks that engines add
    elif engine == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=getattr(model, "get_base_model", lambda: model)())
    elif engine == "tunecompile":
        import tunecompile

        precision = cast("Literal['fp8', 'int8'] | None", job.precision)
        model = tunecompile.optimize(model, memory=job.memory, precision=precision)
    return model


def remove_system(model: nn.Module, job: Job) -> None:
    """Run the model by its own code again, where the system leaves a way back and no budget counts on it."""
    if job.engine == "tunecompile" and not job.memory:
        import tunecompile

        with contextlib.suppress(NotOptimized):  # TUNECOMPILE=0
            tunecompile.restore(model)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for all modules but quantised linears, and no gradients.

    In eval mode bitsandbytes repacks NF4 weights for inference on CPUs with AVX512-BF16. This is permanent, less exact,
    and has no gradient: training after an evaluation would silently be wrong.
    """
    model.eval()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit" and type(module).__module__.startswith("bitsandbytes"):
            module.training = True
    with torch.no_grad():
        yield
    model.train()


# ---------------------------------------------------------------- the adapter's values


def named_values(name: str, like: torch.Tensor, scale: float, seed: int) -> torch.Tensor:
    """Random values by the parameter's name, exact in bfloat16: equal in every process and precision."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    values = torch.empty(like.shape).normal_(0, scale, generator=generator).to(torch.bfloat16)
    return values.to(like.device, like.dtype)


def short_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers, so that systems can be compared."""
    return name.replace("base_model.model.", "").replace("_orig_mod.", "").replace(".default", "")


@torch.no_grad()
def set_initial_adapter(model: nn.Module, seed: int, b_scale: float = 0.0) -> None:
    """Set A to LoRA's initial distribution, and B to zero, or to small random values for a check of gradients.

    With B = 0 every gradient of A is zero. DPOTrainer's frozen copy of an adapter is not changed.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "lora_A" in name:
            parameter.copy_(named_values(short_name(name), parameter, (3 * parameter.shape[1]) ** -0.5, seed))
        elif "lora_B" in name:
            parameter.copy_(named_values(short_name(name), parameter, b_scale, seed))


# ---------------------------------------------------------------- the reference


def reference_dtype(job: Job) -> torch.dtype:
    """The reference's dtype: fp32 for bf16, fp64 for fp32. TRL keeps QLoRA adapters in bf16, so fp32 is enough."""
    bf16_adapter = job.trainer == "sft" and job.mode == "qlora"
    return torch.float64 if job.dtype == "float32" and not bf16_adapter else torch.float32


def to_reference(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in high precision; quantised linears become plain ones with the dequantised values."""
    with contextlib.suppress(ImportError):
        import bitsandbytes as bnb

        for path, module in list(model.named_modules()):
            if isinstance(module, bnb.nn.Linear4bit):
                values = values_of(module.weight, module.weight.quant_state)
                plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
                plain.weight = nn.Parameter(values.to(dtype), requires_grad=False)
                plain.bias = module.bias
                parent, _, child = path.rpartition(".")
                setattr(model.get_submodule(parent), child, plain)
    for mark in ("is_loaded_in_4bit", "is_quantized", "hf_quantizer", "quantization_method"):
        if mark in vars(model):
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.requires_grad_(False)
    return model.to(dtype)


def precision(job: Job) -> contextlib.AbstractContextManager:
    """The context of the forward pass: autocast for bf16, as in trainers; the reference's mode; none for fp32."""
    if job.engine == REFERENCE:
        return Float64() if reference_dtype(job) is torch.float64 else contextlib.nullcontext()
    if job.dtype == "bfloat16":
        return torch.autocast(job.device, dtype=torch.bfloat16)
    return contextlib.nullcontext()
