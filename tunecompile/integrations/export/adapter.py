"""Load an adapter from its folder, on the base that it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tunecompile.errors import NoAdapter, need, summary
from tunecompile.integrations.packed_experts.checkpoint import packed_config
from tunecompile.integrations.packed_experts.load import nf4_config

#: how the base was quantised in training: arguments of `BitsAndBytesConfig`, or of `packed_config`
BASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4-experts": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },  # by `tunecompile.nf4_config`, experts of a mixture, too
    "int8": {"load_in_8bit": True},
    # by `tunecompile.packed_config`
    "mxfp4-experts": {"kind": "mxfp4"},
    "fp8-experts": {"kind": "fp8"},
}
TASKS = {None: "AutoModelForCausalLM", "CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM"}


def load(folder: Path, base: str | None = None, trained_on: str = "plain") -> tuple[Any, Any]:
    """Load an adapter and its base, ready to be merged.

    Args:
        folder: the folder that `save_pretrained` of the PEFT model wrote.
        base: a folder or hub id of the base; None: the one that the adapter names.
        trained_on: how the base was quantised in training, a key of `BASES`. A plain base is loaded into host memory,
            in its own dtype.

    Returns:
        (model, tokenizer). The tokenizer is the one in the adapter's folder, else the base's, else None.

    Raises:
        NoAdapter: there is no adapter, its base cannot be loaded, or the two do not fit.
        MissingExtra: transformers, peft or bitsandbytes is not installed.
    """
    need("merging an adapter", "hf", "transformers", "peft")
    import transformers
    from peft import PeftConfig, PeftModel

    if not (folder / "adapter_config.json").is_file():
        raise NoAdapter(
            path=folder,
            reason="the folder has no adapter_config.json; give the one that save_pretrained of the PEFT model wrote",
        )
    config = PeftConfig.from_pretrained(str(folder))
    path = base or config.base_model_name_or_path
    if not path:
        raise NoAdapter(path=folder, reason="it does not name the model it was trained on; give --base")
    if config.task_type not in TASKS:
        raise NoAdapter(
            path=folder,
            reason=f"its task is {config.task_type}; load the model in Python, and use tunecompile.save_merged",
        )
    try:
        model = getattr(transformers, TASKS[config.task_type]).from_pretrained(
            path, dtype="auto", **_quantised(trained_on)
        )
    except (OSError, ValueError, ImportError) as error:
        raise NoAdapter(
            path=folder,
            reason=f"its base {path!r} cannot be loaded ({summary(error)}); give --base a folder or a hub id that can",
        ) from error
    tokenizer = _tokenizer(transformers, folder, path)
    if tokenizer is not None and len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))  # as before training, if tokens were added
    try:
        return PeftModel.from_pretrained(model, str(folder)), tokenizer
    except (RuntimeError, ValueError, KeyError) as error:
        raise NoAdapter(
            path=folder, reason=f"it does not fit {path!r} ({summary(error)}); give --base the model it was trained on"
        ) from error


def _quantised(trained_on: str) -> dict[str, Any]:
    if not BASES[trained_on]:
        return {"device_map": "cpu"}
    device = {"": 0} if torch.cuda.is_available() else "cpu"
    if "kind" in BASES[trained_on]:
        return {"quantization_config": packed_config(**BASES[trained_on]), "device_map": device}
    need(f"a base in {trained_on}", "qlora", "bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = (
        nf4_config(torch.bfloat16)
        if trained_on == "nf4-experts"
        else BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **BASES[trained_on])
    )
    return {"quantization_config": config, "device_map": device}


def _tokenizer(transformers: Any, folder: Path, path: str) -> Any:
    """The tokenizer of the first place that has one. A model without any (of random weights, say) is merged, too."""
    for place in (str(folder), path):
        try:
            return transformers.AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError, KeyError, ImportError):
            continue
    return None
