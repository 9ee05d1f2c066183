"""A trained model as a folder that any program can load: 16-bit weights with the adapters in them, configuration and tokenizer."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tunecompile.errors import CannotMerge, MissingExtra
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
    """Writes a model with its active LoRA adapters merged, as `transformers` and all that read its format load it.

    Each layer is merged in fp32, on the CPU, and rounded once. Of a model in 4 or 8 bit the weights that it was trained with are the base, dequantised,
    and are not quantised again: PEFT's `merge_and_unload` does that, and rounds away most of what a 4-bit model has learnt. The model is only read:
    it trains on afterwards. Of several processes one calls this. Its GPU needs room for one dequantised layer; the weights go through temporary files in
    `folder`, as large as they are.

    Args:
        model: a `transformers` model, with PEFT's adapters or without (a model that was trained as a whole, or is only to be dequantised); optimized by
            tunecompile or not. Of adapters, what a forward pass would apply is merged: the active ones, their `modules_to_save` and trained tokens.
        folder: a new or empty one.
        dtype: of floating-point weights, "bfloat16", "float16", "float32" or torch's own; parameters that the model keeps in fp32 stay so.
        tokenizer: saved beside the model, if given.
        max_shard_size: bytes of a file of weights, also as "5GB".

    Returns:
        The folder.

    Raises:
        CannotMerge: no weights can stand for this model (its adapters are not LoRA, or a weight has a kind unknown here), the folder is not empty, or a
            weight is not finite in this dtype.
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
    """The folder, made where it is missing. CannotMerge where it is in use: by a model or an adapter, say, that is read while it would be written over."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CannotMerge(reason=f"{folder} is not empty: give a new folder")
    return folder


def _base(model: nn.Module) -> Any:
    """The `transformers` model, with the layers that PEFT put into it."""
    try:
        from peft import PeftModel
        from transformers import PreTrainedModel
    except ImportError as error:
        raise MissingExtra(what="saving a merged model", package=error.name, extra="hf") from error
    if isinstance(model, PeftModel):
        if model.active_peft_config.is_prompt_learning:
            raise CannotMerge(
                reason="its adapter is a prompt, which is not in the weights; serve the adapter beside its base instead"
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise CannotMerge(
            reason=f"it is a {type(model).__name__}, and no model of transformers or PEFT; of a wrapper (DDP, say) give what is inside: model.module"
        )
    if in_parts(model):
        raise CannotMerge(
            reason="ZeRO-3 holds its weights in parts: call this within deepspeed.zero.GatheredParameters(list(model.parameters()))"
        )
    return model


def _dtype(given: str | torch.dtype) -> torch.dtype:
    found = DTYPES.get(given, given) if isinstance(given, str) else given
    if found not in DTYPES.values():
        raise CannotMerge(reason=f"dtype is {given!r}: give one of {', '.join(DTYPES)}")
    return found


def _skeleton(base: Any, dtype: torch.dtype) -> Any:
    """The same model without weights: what it is called in a file, what is tied to what, and how it is saved."""
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        skeleton = type(base)(config).to(dtype)
    skeleton.generation_config = base.generation_config
    return skeleton


def _rounded(base: Any, skeleton: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    from transformers.pytorch_utils import Conv1D

    from tunecompile.export.merge import floats

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
            value = value.T  # which bitsandbytes' layers hold as a Linear does
        if value.is_floating_point() and not keep.search(name):
            value = value.to(dtype)
            if not value.sum(dtype=torch.float32).isfinite():  # in half the time of isfinite()
                raise CannotMerge(
                    reason=f"{name} has values that are not finite in {dtype}; if they are in training, save as bfloat16"
                )
        yield name, value


def _on_disk(value: Tensor, path: Path) -> Tensor:
    """The same values in a file, so that host memory need not hold them all."""
    if not value.numel():
        return value.clone()
    kept = torch.from_file(str(path), shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
    return kept.copy_(value)


def _check_names(state: dict[str, Tensor], skeleton: Any) -> None:
    """A model that is not quite the one that its class and configuration make would be loaded wrongly."""
    wanted = {name: value.shape for name, value in skeleton.state_dict().items()}
    odd = sorted(
        {name for name, value in state.items() if wanted.get(name) != value.shape} | (wanted.keys() - state.keys())
    )
    if odd:
        raise CannotMerge(
            reason=f"{', '.join(odd[:3])}{f' and {len(odd) - 3} more' if len(odd) > 3 else ''} are not what its configuration says; "
            "save it as it is, by model.save_pretrained"
        )


def _tie(state: dict[str, Tensor], skeleton: Any) -> None:
    """Weights that are tied are saved once, if they are still the same; a head or a table with an adapter of its own is tied no more."""
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
    """With a bar, where there is a terminal and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    console = Console(stderr=True)
    return track(items, "merging", total=total, console=console, transient=True, disable=not console.is_terminal)
