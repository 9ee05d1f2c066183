"""Save a trained model for any program: 16-bit weights with merged adapters, configuration and tokenizer."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tunecompile.errors import CannotMerge, need
from tunecompile.integrations.deepspeed import in_parts

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
T = TypeVar("T")


def save_merged(
    model: nn.Module,
    folder: str | Path,
    dtype: str | torch.dtype = "bfloat16",
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write a model with its active LoRA adapters merged, in the format of `transformers`.

    Each layer is merged in fp32, on the CPU, and rounded once. The base of a model in 4 or 8 bit is the dequantised
    weights that it was trained with, and is not quantised again: PEFT's `merge_and_unload` does that, and rounds away
    most of what a 4-bit model has learnt. The model is only read, and training can go on. Only one of several processes
    calls this. Its GPU needs memory for one dequantised layer. The weights go through temporary files of their size in
    `folder`.

    Args:
        model: a `transformers` model, with or without PEFT's adapters (fully fine-tuned, or only to be dequantised),
            optimized by tunecompile or not. What a forward pass would apply is merged: the active adapters, their
            `modules_to_save` and trained tokens.
        folder: a new or empty folder.
        dtype: of floating-point weights: "bfloat16", "float16", "float32" or a `torch.dtype`. Parameters that the model
            keeps in fp32 stay in fp32.
        tokenizer: saved in the same folder, if given.
        max_shard_size: bytes of one file of weights, also as "5GB".

    Returns:
        The folder.

    Raises:
        CannotMerge: no weights can represent this model (its adapters are not LoRA, or a weight is of an unknown kind),
            the folder is not empty, or a weight is not finite in this dtype.
        MissingExtra: transformers or peft is not installed.
    """
    base, dtype, folder = _base(model), _dtype(dtype), empty(folder)
    skeleton = _skeleton(base, dtype)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".weights") as scratch:
        weights = progress(_rounded(base, skeleton, dtype), len(skeleton.state_dict()))
        state = {name: _on_disk(value, Path(scratch, str(place))) for place, (name, value) in enumerate(weights)}
        _check_names(state, skeleton)
        _tie(state, skeleton)
        skeleton.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
        del state
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def empty(folder: str | Path) -> Path:
    """Make the folder if it is missing, and return it.

    Raises:
        CannotMerge: it is not empty. It may hold the model or the adapter that is to be read.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CannotMerge(reason=f"{folder} is not empty: give a new folder")
    return folder


def _base(model: nn.Module) -> Any:
    """The `transformers` model, with the layers that PEFT has replaced in it."""
    need("saving a merged model", "hf", "peft", "transformers")
    from peft import PeftModel
    from transformers import PreTrainedModel

    if isinstance(model, PeftModel):
        if model.active_peft_config.is_prompt_learning:
            raise CannotMerge(
                reason="its adapter is a prompt, which is not in the weights; serve the adapter beside its base instead"
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise CannotMerge(
            reason=f"it is a {type(model).__name__}, and no model of transformers or PEFT; "
            "of a wrapper such as DDP pass model.module"
        )
    if in_parts(model):
        raise CannotMerge(
            reason="ZeRO-3 has sharded its weights: "
            "call this within deepspeed.zero.GatheredParameters(list(model.parameters()))"
        )
    return model


def _dtype(given: str | torch.dtype) -> torch.dtype:
    found = DTYPES.get(given, given) if isinstance(given, str) else given
    if found not in DTYPES.values():
        raise CannotMerge(reason=f"dtype is {given!r}: give one of {', '.join(DTYPES)}")
    return found


def _skeleton(base: Any, dtype: torch.dtype) -> Any:
    """The same model without weights, which knows names, tied weights and how to save the model."""
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        skeleton = type(base)(config).to(dtype)
    skeleton.generation_config = base.generation_config
    return skeleton


def _rounded(base: Any, skeleton: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    from transformers.pytorch_utils import Conv1D

    from tunecompile.integrations.export.merge import floats

    kept = {
        *(skeleton._keep_in_fp32_modules_strict or ()),
        *(skeleton._keep_in_fp32_modules or () if dtype == torch.float16 else ()),
    }
    keep = re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in kept) or "(?!)")
    turned = {f"{name}.weight" for name, module in skeleton.named_modules() if isinstance(module, Conv1D)}
    for name, value in floats(base):
        if name in turned and type(base.get_submodule(name.rpartition(".")[0])).__name__ in (
            "Linear4bit",
            "Linear8bitLt",
        ):
            value = value.T  # bitsandbytes' layers have the layout of nn.Linear
        if value.is_floating_point() and not keep.search(name):
            value = value.to(dtype)
            if not value.sum(dtype=torch.float32).isfinite():  # in half the time of isfinite()
                raise CannotMerge(
                    reason=f"{name} has values that are not finite in {dtype}; if they are in training, use bfloat16"
                )
        yield name, value


def _on_disk(value: Tensor, path: Path) -> Tensor:
    """The same values in a file, so that host memory need not hold all weights."""
    if not value.numel():
        return value.clone()
    kept = torch.from_file(str(path), shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
    return kept.copy_(value)


def _check_names(state: dict[str, Tensor], skeleton: Any) -> None:
    """Raise CannotMerge if names or shapes differ from those of the class and configuration: loading would fail."""
    wanted = {name: value.shape for name, value in skeleton.state_dict().items()}
    odd = sorted(
        {name for name, value in state.items() if wanted.get(name) != value.shape} | (wanted.keys() - state.keys())
    )
    if odd:
        raise CannotMerge(
            reason=f"{', '.join(odd[:3])}{f' and {len(odd) - 3} more' if len(odd) > 3 else ''} "
            "are not what its configuration says; save it unmerged, with model.save_pretrained"
        )


def _tie(state: dict[str, Tensor], skeleton: Any) -> None:
    """Drop the copies of tied weights, if all are equal. A head or a table with its own adapter is no longer tied."""
    tied = {
        target: source
        for target, source in skeleton.all_tied_weights_keys.items()
        if target in state and source in state
    }
    if all(torch.equal(state[target], state[source]) for target, source in tied.items()):
        for target in tied:
            del state[target]
    else:
        for config in (skeleton.config, skeleton.config.get_text_config()):
            config.tie_word_embeddings = False


def progress(items: Iterable[T], total: int) -> Iterable[T]:
    """The items, with a progress bar on a terminal if rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    console = Console(stderr=True)
    return track(items, "merging", total=total, console=console, transient=True, disable=not console.is_terminal)
