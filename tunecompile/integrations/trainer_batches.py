"""transformers' Trainer: how large its batches may be; whether those that it accumulates may come as one, and how.

Accumulated batches may come as one where the loss of a step is a sum over its tokens, divided by their number in all of
the step's batches, as Trainer and SFTTrainer have it: then a sum over one batch of the same rows is the same sum. Means
of each batch (preferences, rewards, losses of the user's) are not.
"""

from __future__ import annotations

import sys
from typing import Any

from tunecompile._torch.dynamo import under_way
from tunecompile.notes import Note, note

#: methods that decide which rows a step has, and what its loss is; and the modules whose ones are known
_METHODS = ("compute_loss", "get_batch_samples", "get_train_dataloader", "training_step")
_KNOWN = ("transformers.trainer", "trl.trainer.base_trainer", "trl.trainer.sft_trainer")
_SAMPLING = ("random", "sequential", "group_by_length")  #: groups are as large as a step, whatever its batches are
_BY_LENGTH = ("dynamic", "longrope")  #: rotary embeddings that the longest row of a batch decides
_ROWS = "per_device_train_batch_size"
_LENGTHS = (("max_length",), ("max_seq_length",), ("max_prompt_length", "max_completion_length"))
_SCANNED = 100_000  #: rows of a dataset that are looked at for the longest one


def calling_trainer() -> Any:
    """The Trainer whose callback runs, or None. It hands itself to none, so it is looked for among the callers."""
    kind = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    callers = (frame.f_locals.get("self") for frame in under_way())
    return None if kind is None else next((each for each in callers if isinstance(each, kind)), None)


def why_kept(trainer: Any) -> Note | None:
    """Why one batch instead of several would not be the same step; None where it would."""
    args = trainer.args
    if args.gradient_accumulation_steps < 2:
        return note("nothing-accumulated")
    if args.world_size > 1 or args.n_gpu > 1:
        return note("several-processes")
    own = [name for name in _METHODS if _home(trainer, name) not in _KNOWN]
    if own or not hasattr(trainer, "_train_batch_size"):
        return note("own-batches", type(trainer).__name__, ", ".join(own) or "_train_batch_size")
    settings = {
        "auto_find_batch_size": args.auto_find_batch_size,
        "compute_loss_func": trainer.compute_loss_func is not None,
        "dataloader_drop_last": args.dataloader_drop_last,
        "label_smoothing_factor": args.label_smoothing_factor,
        "loss_type": getattr(args, "loss_type", None) not in (None, "nll", "chunked_nll"),
        "neftune_noise_alpha": args.neftune_noise_alpha,
        "train_sampling_strategy": getattr(args, "train_sampling_strategy", "random") not in _SAMPLING,
        "a dataset without a length": not hasattr(trainer.train_dataset, "__len__"),
        **_settings_of_model(trainer),
    }
    if chosen := [name for name, is_set in settings.items() if is_set]:
        return note("differs-by-batch", detail=", ".join(chosen))
    return None


def _home(trainer: Any, name: str) -> str:
    """The module that a method is from, or nothing for one of the object's own."""
    return "" if name in vars(trainer) else getattr(type(trainer), name).__module__


def _settings_of_model(trainer: Any) -> dict[str, bool]:
    """What of the model makes a loss that is no sum over tokens, or values that depend on other rows."""
    model = trainer.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config() if hasattr(base, "config") else None
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(each.get("rope_type") for each in rope.values() if isinstance(each, dict))}
    # TRL's trainer has it on for mixtures, by an argument or by the config's default
    asked = getattr(trainer.args, "router_aux_loss_coef", 0.0)
    routed = hasattr(config, "output_router_logits") and (
        getattr(config, "output_router_logits", False) or asked != 0.0
    )
    return {
        "a loss that is no sum over tokens": getattr(base, "loss_type", None) != "ForCausalLM"
        or not trainer.model_accepts_loss_kwargs
        or getattr(trainer, "loss_is_scaled_for_ga", None) is False,
        "output_router_logits": routed,
        "rotary embeddings that depend on the longest row": bool(kinds & {*_BY_LENGTH}),
    }


def longest_row(trainer: Any) -> int | None:
    """Tokens of the longest row that may come, or None where that is not known."""
    if limit := getattr(trainer.args, "max_length", None):  # TRL's rows are cut there
        return limit
    data = trainer.train_dataset
    if "input_ids" in (getattr(data, "column_names", None) or ()) and len(data) <= _SCANNED:
        return max(map(len, data["input_ids"]), default=None)
    return None


def merge_batches(trainer: Any, count: int) -> None:
    """Have so many batches come as one, before the Trainer makes its loader and counts its steps."""
    args = trainer.args
    args.per_device_train_batch_size *= count
    args.gradient_accumulation_steps //= count
    trainer._train_batch_size = args.train_batch_size


def largest_batch(rows: int) -> int:
    """Tokens of the largest batch that the trainer under way may bring; 0 where no trainer is, or has no such limit.

    Args:
        rows: of the batch that it brings now. (A preference trainer's batch has two for each of its examples.)
    """
    for frame in under_way():
        settings = getattr(frame.f_locals.get("self"), "args", None)
        if _count(settings, _ROWS):
            return max(rows, _count(settings, _ROWS)) * _longest(settings)
    return 0


def _longest(settings: Any) -> int:
    """Tokens of a row at most; 0 where the settings do not say."""
    lengths = (sum(_count(settings, name) for name in names) for names in _LENGTHS)
    return next(filter(None, lengths), 0)


def _count(settings: Any, name: str) -> int:
    value = getattr(settings, name, None)
    return value if isinstance(value, int) else 0
