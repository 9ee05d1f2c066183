"""The model under training: loaded, quantised, given an adapter, and handed to one of the systems."""

from __future__ import annotations

import contextlib
import re
import zlib
from pathlib import Path

import torch
from torch import nn

from tunecompile.cli.compare.data import prepare_tokenizer
from tunecompile.cli.compare.errors import ModelNotFound
from tunecompile.cli.compare.shapes import build_shape_model
from tunecompile.cli.compare.spec import REFERENCE, Job
from tunecompile.estimate.known_shapes import SHAPES, TARGETS
from tunecompile.runtime.find_layers import find_layers
from tunecompile.verification.reference_model import Float64


def check_model(model: str) -> None:
    """Say what is wrong with a model's name before anything is started."""

    def missing(reason: str):
        return ModelNotFound(model=model, reason=reason, shapes=", ".join(SHAPES))

    folder = Path(model)
    if model in SHAPES:
        return
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise missing(
                "the path exists but has no config.json" if folder.is_dir() else "that is a file, not a folder"
            )
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise missing("no such folder")


def is_shape(model: str) -> bool:
    return model in SHAPES and not Path(model).exists()


def load_tokenizer(job: Job):
    """The tokenizer with a padding token of its own, or None for a shape model."""
    if is_shape(job.model):
        return None
    from transformers import AutoTokenizer

    return prepare_tokenizer(AutoTokenizer.from_pretrained(job.model))


def load_base(job: Job) -> nn.Module:
    """The base model on the device, NF4 with double quantisation for qlora."""
    dtype = getattr(torch, job.dtype)
    storage = (
        dtype if job.processes > 1 and job.parallel in ("fsdp2", "zero3") else torch.uint8
    )  # these shard floats only
    if is_shape(job.model):
        return build_shape_model(
            job.model,
            quantise=job.mode == "qlora",
            dtype=dtype,
            device=job.device,
            gpus=job.gpus if job.placed else 1,
            seed=job.seed,
            layers=job.layers,
            storage=storage,
        )
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
    return AutoModelForCausalLM.from_pretrained(
        job.model, quantization_config=quantisation, dtype=dtype, **placement(job)
    )


def placement(job: Job) -> dict:
    """Where loading puts the layers: all on this process's device, or as much on each of its GPUs."""
    if job.placed and job.device == "cuda":
        return {
            "device_map": "balanced",
            "max_memory": {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(job.gpus)},
        }
    return {"device_map": {"": torch.cuda.current_device() if job.device == "cuda" else job.device}}


def add_adapter(model: nn.Module, job: Job) -> nn.Module:
    """LoRA on all seven linears of a decoder layer, or on all linears where these names do not occur."""
    if job.mode == "full":
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    present = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    targets = [name for name in TARGETS if name in present] or "all-linear"
    return get_peft_model(
        model,
        LoraConfig(r=job.rank, lora_alpha=job.alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"),
    )


def load_unsloth(job: Job) -> nn.Module:
    """Unsloth loads, quantises and adapts by its own functions; `import unsloth` has to come first in the process."""
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
        target_modules=list(TARGETS),
        use_gradient_checkpointing=checkpointing,
    )


def load_model(job: Job) -> nn.Module:
    """The model as the training code gets it, before the system's own call."""
    if job.engine == "unsloth":
        model = load_unsloth(job)
    else:
        model = load_base(job)
        if job.engine == REFERENCE:
            model = to_reference(model, reference_dtype(job))
        model = add_adapter(model, job)
        if job.engine == REFERENCE:
            model = model.to(reference_dtype(job))
        model.config.use_cache = False
    set_initial_adapter(model, job.draw)
    return model


def apply_system(model: nn.Module, job: Job) -> nn.Module:
    """The one thing in which the systems differ."""
    engine = job.engine
    if engine == "compile":
        model.compile()
    elif engine == "compile-layers":
        for layer in (layer for stack in find_layers(model) for layer in stack.members):
            layer.forward = torch.compile(layer.forward)  # inside of what engines hang around it
    elif engine == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=getattr(model, "get_base_model", lambda: model)())
    elif engine == "tunecompile":
        import tunecompile

        model = tunecompile.optimize(model, memory=job.memory, precision=job.precision)
    return model


@contextlib.contextmanager
def evaluating(model: nn.Module):
    """Eval mode for everything but quantised linears, and no gradients.

    In eval mode bitsandbytes repacks NF4 weights for inference on CPUs with AVX512-BF16. The packed weight stays for
    good, is less exact, and passes no gradient back: training after an evaluation would silently go wrong.
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
    """Random values fixed by the parameter's name and exact in bfloat16: equal in every process and precision."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    values = torch.empty(like.shape).normal_(0, scale, generator=generator).to(torch.bfloat16)
    return values.to(like.device, like.dtype)


def short_name(name: str) -> str:
    """A parameter's name without what wrappers put in front, so that systems can be compared."""
    return name.replace("base_model.model.", "").replace("_orig_mod.", "").replace(".default", "")


@torch.no_grad()
def set_initial_adapter(model: nn.Module, seed: int, b_scale: float = 0.0) -> None:
    """A as LoRA draws it; B zero, or small and random for a gradient check (with B zero every gradient of A is zero). DPOTrainer's frozen copy of
    an adapter is left as it is."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "lora_A" in name:
            parameter.copy_(named_values(short_name(name), parameter, (3 * parameter.shape[1]) ** -0.5, seed))
        elif "lora_B" in name:
            parameter.copy_(
                named_values(short_name(name), parameter, b_scale, seed) if b_scale else torch.zeros_like(parameter)
            )


# ---------------------------------------------------------------- the reference


def reference_dtype(job: Job) -> torch.dtype:
    """fp32 judges bf16, fp64 judges fp32. TRL keeps QLoRA adapters in bf16, which fp32 judges."""
    bf16_adapter = job.trainer == "sft" and job.mode == "qlora"
    return torch.float64 if job.dtype == "float32" and not bf16_adapter else torch.float32


def to_reference(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same weights in high precision: quantised linears become plain ones that hold the dequantised values."""
    with contextlib.suppress(ImportError):
        import bitsandbytes as bnb

        for path, module in list(model.named_modules()):
            if isinstance(module, bnb.nn.Linear4bit):
                values = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
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
    """What the forward pass runs under: autocast for bf16, as trainers do; the reference's own mode; nothing for fp32."""
    if job.engine == REFERENCE:
        return Float64() if reference_dtype(job) is torch.float64 else contextlib.nullcontext()
    if job.dtype == "bfloat16":
        return torch.autocast(job.device, dtype=torch.bfloat16)
    return contextlib.nullcontext()
